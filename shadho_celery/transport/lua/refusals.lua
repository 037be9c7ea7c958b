-- Tell which attempts will be refused at every claim.
--
-- KEYS  1 attempts  2 leases  3 done
-- ARGV  1 '1' to tell of the seats of their gangs: as long as an attempt runs, its seats can be taken
--       then number and attempt of each
-- Returns for each 1, or 0 if it may be claimed, be it later: after `done:N` another attempt may follow

-- include record
local answer = {}
for i = 2, #ARGV, 2 do
  local last = record(ARGV[i])
  local latest = last == 'done' and math.huge or tonumber(last and string.match(last, '%d+') or 0)
  local runs = ARGV[1] == '1' and redis.call('ZSCORE', KEYS[2], ARGV[i] .. '.' .. ARGV[i + 1])
  answer[#answer + 1] = latest >= tonumber(ARGV[i + 1]) and not runs and 1 or 0
end
return answer
