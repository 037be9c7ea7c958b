-- Put a request into the inbox of a scheduler or worker, unless the inbox is full.
--
-- KEYS  1 inbox
-- ARGV  1 sealed request  2 maximum number of requests in the inbox  3 seconds for which the inbox is kept
-- Returns the id of the request's entry, or '' if the inbox is full

if redis.call('XLEN', KEYS[1]) >= tonumber(ARGV[2]) then return '' end
local id = redis.call('XADD', KEYS[1], '*', 'r', ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return id
