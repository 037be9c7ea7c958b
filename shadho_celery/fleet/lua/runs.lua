-- Return whether an attempt runs: true, 'perhaps', or false or nil. The first two keys are `attempts` and `leases`, the
-- last key is `done`. This file also sets `now`.
-- include now
-- include record
local function runs(number, attempt)
  local last = record(number)
  local lease = redis.call('ZSCORE', KEYS[2], number .. '.' .. attempt)
  -- If there is no record, Redis has lost its data, and the next renewal records a running attempt again.
  if not last then return 'perhaps' end
  return string.sub(last, 1, 4) ~= 'done' and lease and tonumber(lease) > 0
end
