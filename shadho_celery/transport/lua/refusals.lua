-- Tell which attempts will be refused at every claim.
--
-- KEYS  1 attempts
-- ARGV  number and attempt of each
-- Returns for each 1, or 0 if it may be claimed, be it later: after `done:N` another attempt may follow

local answer = {}
for i = 1, #ARGV, 2 do
  local last = redis.call('HGET', KEYS[1], ARGV[i])
  local latest = tonumber(last and string.match(last, '%d+') or 0)
  answer[#answer + 1] = latest >= tonumber(ARGV[i + 1]) and 1 or 0
end
return answer
