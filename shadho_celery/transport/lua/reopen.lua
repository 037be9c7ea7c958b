-- Let a later attempt be claimed if this one or an earlier one has ended the trial.
--
-- KEYS  1 attempts
-- ARGV  number and attempt of each

for i = 1, #ARGV, 2 do
  local last = redis.call('HGET', KEYS[1], ARGV[i])
  local ended = last and string.match(last, '^done:(%d+):')
  if ended and tonumber(ended) <= tonumber(ARGV[i + 1]) then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
-- include keep
