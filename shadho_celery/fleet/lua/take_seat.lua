-- Take a seat in a gang for a replica.
--
-- KEYS  1 attempts  2 leases  3 cancel  4 gangs  5 seats  6 breakers  7 yields  8 done
-- ARGV  1 duration of a lease in ms  2 delivery  3 worker  4 strikes that open its circuit breaker
--       5 number  6 attempt  7 call  8 rank
-- Returns 1 taken; 0 refused; -1 the worker's circuit breaker is open. A seat is refused if its attempt does not run,
-- should stop or has called again, if its slot was reclaimed, or if it is done or another worker has it

-- include runs
local number, attempt, call = ARGV[5], ARGV[6], ARGV[7]
local seat = number .. '.' .. attempt .. '.' .. call .. '.' .. ARGV[8]
-- A new seat needs a record that the attempt runs; 'perhaps' is not enough.
if runs(number, attempt) ~= true or redis.call('SISMEMBER', KEYS[3], number) == 1 then return 0 end
if redis.call('SISMEMBER', KEYS[7], seat) == 1 then return 0 end
local latest = redis.call('HGET', KEYS[4], number .. '.' .. attempt)
if latest and string.match(latest, '^%d+') ~= call then return 0 end
local seated = redis.call('HGET', KEYS[5], seat)
local lasts, holder = string.match(seated or '', '^taken:(%d+):(.*)$')
if holder == ARGV[2] then return 1 end
if seated == 'done' or (holder and tonumber(lasts) > now) then return 0 end
local strikes = redis.call('HGET', KEYS[6], ARGV[3])
if strikes and (strikes == 'quarantined' or (tonumber(strikes) or 0) >= tonumber(ARGV[4])) then return -1 end
redis.call('HSET', KEYS[5], seat, 'taken:' .. string.format('%.0f', now + ARGV[1]) .. ':' .. ARGV[2])
-- include keep
return 1
