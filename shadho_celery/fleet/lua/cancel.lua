-- Take back attempts: an attempt that is taken back can no longer be claimed, and its Lost event is sent.
--
-- KEYS  1 attempts  2 cancel  3 events  4 leases  5 done
-- ARGV  1 mode; then for each attempt its number, attempt and sealed Lost event
-- Modes 'keep', 'stop', 'prune' and 'revoke' take back the attempts that are not claimed. Trials that have ended do not
-- change. The modes differ in what happens to claimed attempts:
--   'keep'    they continue
--   'stop'    their workers are asked to stop them
--   'prune'   like 'stop', and the workers learn that the trials are pruned
--   'revoke'  they are taken back too and their leases end; live workers notice this at the next renewal
-- Mode 'void' is for attempts whose result never arrived. It takes back an attempt if its trial has ended, or if it was
-- claimed and neither it nor the trial's latest attempt has a lease. Attempts that may still be claimed do not change.

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
    -- A later attempt that is claimed keeps its claim, unless its result is missing too (mode 'void').
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
