-- End the leases that were not renewed in time; renew the study's keys.
--
-- KEYS  1 leases  2 attempts  3 cancel  4 events  5 breakers  6 known  7 gangs  8 seats  9 yields  10 done
-- Returns "number.attempt" of each ended lease that the scheduler has not removed yet

-- include now
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(0', now)) do redis.call('ZADD', KEYS[1], 0, member) end
-- No lease lasts longer than a day (SHADHO_LEASE_SECONDS). A later end is forged, or the server's clock was ahead.
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], now + 172800000, '+inf')) do redis.call('ZADD', KEYS[1], 0, member) end
-- include keep
return redis.call('ZRANGEBYSCORE', KEYS[1], 0, 0)
