-- Move ended trials from `attempts` to `done`, after their ends were recorded in the store.
--
-- KEYS  1 attempts  2 done
-- ARGV  for each trial its number and the attempt that ended it; a trial with a later attempt is not moved

for i = 1, #ARGV, 2 do
  local last = redis.call('HGET', KEYS[1], ARGV[i])
  if last and string.match(last, '^done:(%d+):') == ARGV[i + 1] then
    redis.call('SETBIT', KEYS[2], ARGV[i], 1)
    redis.call('HDEL', KEYS[1], ARGV[i])
  end
end
-- include keep
