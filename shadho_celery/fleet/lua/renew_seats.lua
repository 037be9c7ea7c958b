-- Renew the seats of replicas.
--
-- KEYS  1 attempts  2 leases  3 cancel  4 seats  5 yields  6 done
-- ARGV  1 duration of a lease in ms; then number, attempt, seat and delivery of each replica
-- Returns for each replica 'ok', 'gone' (it should stop) or 'yield' (it should stop, because a trial wants its slot)

-- include runs
local answer = {}
for i = 2, #ARGV, 4 do
  local number, attempt, seat, delivery = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local seated = redis.call('HGET', KEYS[4], seat)
  local mine = not seated or string.match(seated, '^taken:%d+:(.*)$') == delivery
  if not (mine and runs(number, attempt)) or redis.call('SISMEMBER', KEYS[3], number) == 1 then
    answer[#answer + 1] = 'gone'
  else
    redis.call('HSET', KEYS[4], seat, 'taken:' .. string.format('%.0f', now + ARGV[1]) .. ':' .. delivery)
    answer[#answer + 1] = redis.call('SISMEMBER', KEYS[5], seat) == 1 and 'yield' or 'ok'
  end
end
-- include keep
return answer
