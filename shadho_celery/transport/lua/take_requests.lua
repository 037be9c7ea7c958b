-- Remove the first requests from a list and return them. A request that is too long is dropped here, because it might
-- fill the memory of the worker.
--
-- KEYS  1 logs
-- ARGV  1 maximum number of requests  2 maximum bytes of a request
-- Returns the requests, with '' for each request that was dropped

local answer = {}
for _, text in ipairs(redis.call('LPOP', KEYS[1], ARGV[1]) or {}) do
  answer[#answer + 1] = #text <= tonumber(ARGV[2]) and text or ''
end
return answer
