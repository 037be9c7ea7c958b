-- Renew the scheduler's lock, or take it if it is free. Then remove the events that are recorded in the store.
--
-- KEYS  1 events  2 holder
-- ARGV  1 holder  2 duration of its lock in ms  3 holder that has died, whose lock may be taken over, or ''
--       4 id of the last event that is recorded, or ''
-- Returns the holder of the lock. If the holder is another scheduler, no events are removed

local held = redis.call('GET', KEYS[2])
-- `pcall` ignores an error: a Redis without free memory refuses SET, but the events must be removed in any case.
if not held or held == ARGV[3] then redis.pcall('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
elseif held == ARGV[1] then redis.call('PEXPIRE', KEYS[2], ARGV[2])
else
  -- A value without a time to live, which only another client can have written, would lock the study for ever.
  if redis.call('PTTL', KEYS[2]) < 0 then redis.call('PEXPIRE', KEYS[2], ARGV[2]) end
  return held
end
-- If the event is not in the stream, a replica of the server has taken over with another stream. The events of that
-- stream are not recorded yet, although they may have lower ids.
if ARGV[4] ~= '' and redis.call('XDEL', KEYS[1], ARGV[4]) == 1 then redis.call('XTRIM', KEYS[1], 'MINID', ARGV[4]) end
return ARGV[1]
