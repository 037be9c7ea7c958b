-- Give each of KEYS a time to live of a week (ERASED_SECONDS in channel.py), unless six days or more are left.
for _, key in ipairs(KEYS) do
  local left = redis.call('TTL', key)
  if left > -2 and left < 518400 then redis.call('EXPIRE', key, 604800) end
end
