-- Return whether an attempt runs: true, false, or 'perhaps'. The first two keys are attempts and leases, the last done.
-- Sets `now`, too.
-- include now
-- include record
local function runs(number, attempt)
  local last = record(number)
  local lease = redis.call('ZSCORE', KEYS[2], number .. '.' .. attempt)
  -- Without any record Redis has lost its data; the next renewal records a running attempt again.
  if not last then return 'perhaps' end
  return string.sub(last, 1, 4) ~= 'done' and lease and tonumber(lease) > 0
end
