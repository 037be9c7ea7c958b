-- Return whether an attempt runs: true, 'perhaps' (Redis has lost its data), or false or nil (no).
-- The first two keys are `attempts` and `leases`, the last key is `done`. This file also sets `now`.
-- include now
-- include record
local function runs(number, attempt)
  local last = record(number)
  local lease = redis.call('ZSCORE', KEYS[2], number .. '.' .. attempt)
  -- Redis has lost its data. If the attempt runs, the next renewal records it again.
  if not last then return 'perhaps' end
  return string.sub(last, 1, 4) ~= 'done' and lease and tonumber(lease) > 0
end
