-- Take back attempts.
--
-- KEYS  1 attempts  2 cancel  3 events  4 leases  5 done
-- ARGV  1 the part of the claimed ones: 'keep' (they go on), 'stop' (their workers are asked to stop them) or 'revoke'
--       (their leases end, too: their workers are gone, or learn of it at the next renewal);
--       then for each attempt its number, attempt and sealed Lost event

-- include record
for i = 2, #ARGV, 3 do
  local number, attempt = ARGV[i], ARGV[i + 1]
  local last = record(number)
  local done = last and string.sub(last, 1, 4) == 'done'
  local latest = last and not done and tonumber(string.match(last, '^%d+')) or 0
  local claimed = latest >= tonumber(attempt)
  if not done and (not claimed or ARGV[1] == 'revoke') then
    -- A later attempt that is claimed stays so.
    if latest <= tonumber(attempt) then redis.call('HSET', KEYS[1], number, attempt) end
    redis.call('ZREM', KEYS[4], number .. '.' .. attempt)
    redis.call('XADD', KEYS[3], '*', 'e', ARGV[i + 2])
  elseif claimed and ARGV[1] == 'stop' then redis.call('SADD', KEYS[2], number) end
end
-- include keep
