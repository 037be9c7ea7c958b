-- End the leases that have run out.
--
-- KEYS  1 leases
-- Returns the "number.attempt" of all that have ended and are not forgotten

-- include now
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(0', now)) do redis.call('ZADD', KEYS[1], 0, member) end
return redis.call('ZRANGEBYSCORE', KEYS[1], 0, 0)
