-- Take the first requests off a list. One that is too long is dropped here: it might fill the memory of the taker.
--
-- KEYS  1 logs
-- ARGV  1 most requests  2 most bytes of one
-- Returns the requests; '' in place of one that was dropped

local answer = {}
for _, text in ipairs(redis.call('LPOP', KEYS[1], ARGV[1]) or {}) do
  answer[#answer + 1] = #text <= tonumber(ARGV[2]) and text or ''
end
return answer
