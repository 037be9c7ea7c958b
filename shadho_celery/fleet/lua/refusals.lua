-- Return which attempts can no longer be claimed by any worker.
--
-- KEYS  1 attempts  2 leases  3 done
-- ARGV  1 '1' if the messages offer seats in the attempts' gangs, which can be taken while the attempt runs, else '0';
--       then number and attempt of each
-- Returns for each attempt 1 if it is refused, or 0 if it may be claimed now or later (attempts after N if the
-- record is `done:N`)

-- include record
local answer = {}
for i = 2, #ARGV, 2 do
  local last = record(ARGV[i])
  local latest = last == 'done' and math.huge or tonumber(last and string.match(last, '%d+') or 0)
  local runs = ARGV[1] == '1' and redis.call('ZSCORE', KEYS[2], ARGV[i] .. '.' .. ARGV[i + 1])
  answer[#answer + 1] = latest >= tonumber(ARGV[i + 1]) and not runs and 1 or 0
end
return answer
