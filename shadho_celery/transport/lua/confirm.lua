-- Renew the scheduler's lock, or take it if nobody has it; then remove the events that are recorded.
--
-- KEYS  1 events  2 holder
-- ARGV  1 holder  2 its lock in ms  3 holder that has died, whose lock may be taken over, or ''
--       4 id of the last event that is recorded, or ''
-- Returns the holder; if it is another one nothing changes

local held = redis.call('GET', KEYS[2])
-- Not `call`: a Redis that is full refuses it, and must be emptied all the same.
if not held or held == ARGV[3] then redis.pcall('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
elseif held == ARGV[1] then redis.call('PEXPIRE', KEYS[2], ARGV[2])
else
  -- A value that somebody wrote without a time to live would keep everybody out for good.
  if redis.call('PTTL', KEYS[2]) < 0 then redis.call('PEXPIRE', KEYS[2], ARGV[2]) end
  return held
end
-- Without that event this is another stream, of a server that took over: its ids may be lower, and are not recorded.
if ARGV[4] ~= '' and redis.call('XDEL', KEYS[1], ARGV[4]) == 1 then redis.call('XTRIM', KEYS[1], 'MINID', ARGV[4]) end
return ARGV[1]
