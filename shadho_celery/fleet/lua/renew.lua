-- Renew leases and the study's keys. Record a running attempt again if Redis has lost its data.
--
-- KEYS  1 attempts  2 leases  3 cancel  4 events  5 breakers  6 known  7 gangs  8 seats  9 yields  10 done
-- ARGV  1 duration of a lease in ms; then "number.attempt" of each lease
-- Returns for each lease 'ok', 'cancel' or 'prune' (the trial should stop), or 'gone' (the worker has lost the lease)

-- include now
-- include record
-- include told
local answer = {}
for i = 2, #ARGV do
  local number, attempt = string.match(ARGV[i], '^(%d+)%.(%d+)$')
  local lease = redis.call('ZSCORE', KEYS[2], ARGV[i])
  local unknown = not lease and not record(number)
  if unknown then redis.call('HSET', KEYS[1], number, attempt .. ':again') end
  if not unknown and (not lease or tonumber(lease) == 0) then answer[i - 1] = 'gone'
  else
    redis.call('ZADD', KEYS[2], now + ARGV[1], ARGV[i])
    answer[i - 1] = told(KEYS[3], number)
  end
end
if redis.call('TTL', KEYS[2]) < 518400 then
-- include keep
end
return answer
