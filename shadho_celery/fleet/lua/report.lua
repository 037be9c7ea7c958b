-- Send a report of an attempt that runs.
--
-- KEYS  1 leases  2 events  3 cancel
-- ARGV  1 number  2 attempt  3 sealed Report  4 number of waiting events at which reports are refused
-- Returns 'ok', 'cancel' or 'prune' (the trial should stop), or 'refused' if the attempt no longer has a lease or too
-- many events wait for the scheduler

-- include told
local lease = redis.call('ZSCORE', KEYS[1], ARGV[1] .. '.' .. ARGV[2])
if not lease or tonumber(lease) == 0 or redis.call('XLEN', KEYS[2]) >= tonumber(ARGV[4]) then return 'refused' end
redis.call('XADD', KEYS[2], '*', 'e', ARGV[3])
return told(KEYS[3], ARGV[1])
