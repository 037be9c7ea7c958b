-- Record and announce an attempt's call for the replicas of its gang.
--
-- KEYS  1 attempts  2 leases  3 events  4 gangs  5 done
-- ARGV  1 number  2 attempt  3 call  4 sealed event
-- Returns 1, or 0 if the attempt does not run and nothing was recorded

-- include runs
if not runs(ARGV[1], ARGV[2]) then return 0 end
redis.call('HSET', KEYS[4], ARGV[1] .. '.' .. ARGV[2], ARGV[3] .. ' ' .. ARGV[4])
redis.call('XADD', KEYS[3], '*', 'e', ARGV[4])
-- include keep
return 1
