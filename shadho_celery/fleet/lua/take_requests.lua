-- Remove the first requests from an inbox and return them. A request that is too long is dropped here, because it might
-- fill the memory of its reader.
--
-- KEYS  1 inbox
-- ARGV  1 maximum number of requests  2 maximum bytes of a request
-- Returns the server's time in ms, and the requests, with '' for each request that was dropped or is malformed

-- include now
local answer = { now }
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', ARGV[1])) do
  redis.call('XDEL', KEYS[1], entry[1])
  local name, text = entry[2][1], entry[2][2]
  answer[#answer + 1] = name == 'r' and #text <= tonumber(ARGV[2]) and text or ''
end
return answer
