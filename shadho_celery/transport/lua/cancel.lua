-- Take back attempts.
--
-- KEYS  1 attempts  2 cancel  3 events  4 leases  5 done
-- ARGV  1 the part of the claimed ones: 'keep' (they go on), 'stop' (their workers are asked to stop them), 'prune'
--       (for their reports), 'revoke' (their leases end, too: their workers are gone, or learn of it at the next
--       renewal) or 'void' (also where their trial has ended, for its result never came; but not those that run or may
--       be claimed, nor while a later one runs); then for each attempt its number, attempt and sealed Lost event

-- include record
local mode = ARGV[1]
local function has_lease(number, attempt) return redis.call('ZSCORE', KEYS[4], number .. '.' .. attempt) end

for i = 2, #ARGV, 3 do
  local number, attempt = ARGV[i], ARGV[i + 1]
  local last = record(number)
  local done = last and string.sub(last, 1, 4) == 'done'
  local latest = last and not done and tonumber(string.match(last, '^%d+')) or 0
  local claimed = latest >= tonumber(attempt)
  local void = not done and (not claimed or mode == 'revoke')
  if mode == 'void' then
    void = done or claimed and not (has_lease(number, attempt) or has_lease(number, latest))
  end
  if void then
    -- A later attempt that is claimed stays so, unless it is missing, too.
    if latest <= tonumber(attempt) or mode == 'void' then
      redis.call('HSET', KEYS[1], number, attempt .. beside(last or '', KEYS[4], number, attempt))
    end
    redis.call('ZREM', KEYS[4], number .. '.' .. attempt)
    redis.call('XADD', KEYS[3], '*', 'e', ARGV[i + 2])
  elseif claimed and (mode == 'stop' or mode == 'prune') then
    redis.call('SADD', KEYS[2], number)
    if mode == 'prune' then redis.call('SADD', KEYS[2], number .. ':pruned') end
  end
end
-- include keep
