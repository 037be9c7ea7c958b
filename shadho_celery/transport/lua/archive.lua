-- Move ended trials from `attempts` to `done`: their ends are recorded.
--
-- KEYS  1 attempts  2 done
-- ARGV  number of each trial, and the attempt that ended it; a trial stays if another attempt followed

for i = 1, #ARGV, 2 do
  local last = redis.call('HGET', KEYS[1], ARGV[i])
  if last and string.match(last, '^done:(%d+):') == ARGV[i + 1] then
    redis.call('SETBIT', KEYS[2], ARGV[i], 1)
    redis.call('HDEL', KEYS[1], ARGV[i])
  end
end
-- include keep
