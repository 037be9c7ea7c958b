-- Drop messages that are the next ones of a queue, a list whose last item is the next.
--
-- KEYS  1 queue
-- ARGV  1 items to look at; then the items to drop
-- Returns the number of dropped items

local unwanted = {}
for i = 2, #ARGV do unwanted[ARGV[i]] = true end
local items = redis.call('LRANGE', KEYS[1], -ARGV[1], -1)
redis.call('LTRIM', KEYS[1], 0, -#items - 1)
local dropped = 0
for _, item in ipairs(items) do
  if unwanted[item] then dropped = dropped + 1 else redis.call('RPUSH', KEYS[1], item) end
end
return dropped
