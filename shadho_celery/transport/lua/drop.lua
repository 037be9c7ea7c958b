-- Delete unwanted messages among the next ones in a queue. The queue is a list, and its last item is delivered next.
--
-- KEYS  1 queue
-- ARGV  1 number of items to examine; then the items to delete
-- Returns the number of deleted items

local unwanted = {}
for i = 2, #ARGV do unwanted[ARGV[i]] = true end
local items = redis.call('LRANGE', KEYS[1], -ARGV[1], -1)
redis.call('LTRIM', KEYS[1], 0, -#items - 1)
local dropped = 0
for _, item in ipairs(items) do
  if unwanted[item] then dropped = dropped + 1 else redis.call('RPUSH', KEYS[1], item) end
end
return dropped
