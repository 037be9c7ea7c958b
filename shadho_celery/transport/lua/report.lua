-- Send a report of an attempt that runs.
--
-- KEYS  1 leases  2 events
-- ARGV  1 "number.attempt"  2 sealed Report  3 events from which on reports are refused
-- Returns 1, or 0 if the attempt has no lease any more, or if too many events wait for the scheduler

local lease = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not lease or tonumber(lease) == 0 or redis.call('XLEN', KEYS[2]) >= tonumber(ARGV[3]) then return 0 end
redis.call('XADD', KEYS[2], '*', 'e', ARGV[2])
return 1
