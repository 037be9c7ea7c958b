-- Tell whether an attempt runs: true, false, or 'perhaps'. KEYS 1 and 2 are attempts and leases.
-- include now
local function runs(number, attempt)
  local last = redis.call('HGET', KEYS[1], number)
  local lease = redis.call('ZSCORE', KEYS[2], number .. '.' .. attempt)
  -- Without any record Redis has lost its memory; what runs will be known again at its next renewal.
  if not last then return 'perhaps' end
  return string.sub(last, 1, 4) ~= 'done' and lease and tonumber(lease) > 0
end
