-- Free a seat after its replica has ended ('left'), or mark its work as done.
--
-- KEYS  1 attempts  2 leases  3 events  4 seats  5 yields  6 done
-- ARGV  1 number  2 attempt  3 seat  4 delivery  5 'left' or 'done'  6 sealed event, or ''
-- Returns 1, or 0 if the attempt has already ended or another worker has the seat

-- include runs
local seated = redis.call('HGET', KEYS[4], ARGV[3])
redis.call('SREM', KEYS[5], ARGV[3])
if not (seated and string.match(seated, '^taken:%d+:(.*)$') == ARGV[4] and runs(ARGV[1], ARGV[2])) then return 0 end
redis.call('HSET', KEYS[4], ARGV[3], ARGV[5])
if ARGV[6] ~= '' then redis.call('XADD', KEYS[3], '*', 'e', ARGV[6]) end
-- include keep
return 1
