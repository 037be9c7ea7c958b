-- Allow later attempts of trials to be claimed, if the given attempt or an earlier one has ended the trial.
--
-- KEYS  1 attempts  2 done
-- ARGV  number and attempt of each

-- include record
for i = 1, #ARGV, 2 do
  local last = record(ARGV[i])
  local ended = last and string.match(last, '^done:(%d+):')
  -- `done` does not contain which attempt ended a trial. The scheduler knows it, so its call is trusted.
  if last == 'done' or ended and tonumber(ended) <= tonumber(ARGV[i + 1]) then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
-- include keep
