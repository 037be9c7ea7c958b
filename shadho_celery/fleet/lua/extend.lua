-- Renew every lease that has not ended.
--
-- KEYS  1 leases
-- ARGV  1 duration of a lease in ms

-- include now
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(0', '+inf')) do
  redis.call('ZADD', KEYS[1], now + ARGV[1], member)
end
