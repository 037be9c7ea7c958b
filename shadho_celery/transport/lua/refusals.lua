-- Tell which attempts will be refused at every claim.
--
-- KEYS  1 attempts  2 done
-- ARGV  number and attempt of each
-- Returns for each 1, or 0 if it may be claimed, be it later: after `done:N` another attempt may follow

-- include record
local answer = {}
for i = 1, #ARGV, 2 do
  local last = record(ARGV[i])
  local latest = last == 'done' and math.huge or tonumber(last and string.match(last, '%d+') or 0)
  answer[#answer + 1] = latest >= tonumber(ARGV[i + 1]) and 1 or 0
end
return answer
