-- End the leases that were not renewed in time.
--
-- KEYS  1 leases
-- Returns "number.attempt" of each ended lease that the scheduler has not removed

-- include now
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(0', now)) do redis.call('ZADD', KEYS[1], 0, member) end
return redis.call('ZRANGEBYSCORE', KEYS[1], 0, 0)
