"""The scripts that decide who runs what, in Redis and in one step each; `channel.py` calls them and tells the keys."""

from __future__ import annotations

#: failures in a row that no other worker has had, after which a worker gets no more until its scheduler has judged it
MAX_STRIKES = 2

_NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"

#: KEYS attempts leases events cancel strikes known; ARGV lease_ms delivery worker strikes, then number attempt event of
#: a result and of a claim, each with an empty number where there is none, and how the result failed: '' where it did
#: not, or 'unwatched'. Returns for both 1: taken, 0: refused; and -1 for a claim of a worker that must wait.
STEP = (
    _NOW
    + """
local delivery, worker = ARGV[2], ARGV[3]
local function judge(failure)
  local strikes = redis.call('HGET', KEYS[5], worker)
  if strikes == 'fenced' then return end
  if failure == '' then
    if strikes then redis.call('HDEL', KEYS[5], worker) end
  elseif failure ~= 'unwatched' and redis.call('SISMEMBER', KEYS[6], failure) == 0 then
    redis.call('HINCRBY', KEYS[5], worker, 1)
  end
end
local function finish(number, attempt, event, failure)
  local last = redis.call('HGET', KEYS[1], number)
  local mine = 'done:' .. attempt .. ':' .. delivery
  -- Said before; it was the answer that got lost.
  if last == mine then return 1 end
  local lease = redis.call('ZSCORE', KEYS[2], number .. '.' .. attempt)
  -- Without a record Redis has lost its memory; the store takes one result a trial in any case.
  if last and (string.sub(last, 1, 4) == 'done' or not lease or tonumber(lease) == 0) then
    redis.call('HINCRBY', KEYS[1], 'refused', 1)
    return 0
  end
  redis.call('XADD', KEYS[3], '*', 'e', event)
  redis.call('HSET', KEYS[1], number, mine)
  for each = 1, tonumber(last and string.match(last, '^%d+') or attempt) do
    redis.call('ZREM', KEYS[2], number .. '.' .. each)
  end
  redis.call('SREM', KEYS[4], number)
  judge(failure)
  return 1
end
local function claim(number, attempt, event)
  local last = redis.call('HGET', KEYS[1], number)
  if last == attempt .. ':' .. delivery then return 1 end
  if last and (string.sub(last, 1, 4) == 'done' or tonumber(string.match(last, '^%d+')) >= tonumber(attempt)) then
    return 0
  end
  local strikes = redis.call('HGET', KEYS[5], worker)
  if strikes and (strikes == 'fenced' or tonumber(strikes) >= tonumber(ARGV[4])) then return -1 end
  redis.call('HSET', KEYS[1], number, attempt .. ':' .. delivery)
  redis.call('SREM', KEYS[4], number)
  redis.call('ZADD', KEYS[2], now + ARGV[1], number .. '.' .. attempt)
  redis.call('XADD', KEYS[3], '*', 'e', event)
  return 1
end
local finished, claimed = 0, 0
if ARGV[5] ~= '' then finished = finish(ARGV[5], ARGV[6], ARGV[7], ARGV[11]) end
if ARGV[8] ~= '' then claimed = claim(ARGV[8], ARGV[9], ARGV[10]) end
return {finished, claimed}
"""
)

#: KEYS attempts leases cancel; ARGV lease_ms, then number.attempt each. Renews; returns per attempt 'ok', 'cancel' or
#: 'gone'. Where Redis has lost its memory, what runs is known again.
RENEW = (
    _NOW
    + """
local answer = {}
for i = 2, #ARGV do
  local number, attempt = string.match(ARGV[i], '^(%d+)%.(%d+)$')
  local lease = redis.call('ZSCORE', KEYS[2], ARGV[i])
  local forgotten = not lease and redis.call('HEXISTS', KEYS[1], number) == 0
  if forgotten then redis.call('HSET', KEYS[1], number, attempt .. ':again') end
  if not forgotten and (not lease or tonumber(lease) == 0) then answer[i - 1] = 'gone'
  else
    redis.call('ZADD', KEYS[2], now + ARGV[1], ARGV[i])
    answer[i - 1] = redis.call('SISMEMBER', KEYS[3], number) == 1 and 'cancel' or 'ok'
  end
end
return answer
"""
)

#: KEYS leases. Ends the leases that have run out and returns all that have ended and are not forgotten.
EXPIRE = (
    _NOW
    + """
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(0', now)) do redis.call('ZADD', KEYS[1], 0, member) end
return redis.call('ZRANGEBYSCORE', KEYS[1], 0, 0)
"""
)

#: KEYS leases; ARGV lease_ms. Renews all that have not been ended.
EXTEND = (
    _NOW
    + """
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(0', '+inf')) do
  redis.call('ZADD', KEYS[1], now + ARGV[1], member)
end
"""
)

#: KEYS attempts cancel events leases; ARGV mode, then number attempt event each. Takes back what is not claimed; what
#: is: mode 'leave' does nothing, 'stop' asks it to stop, 'gone' takes it back as well, for nobody runs it any more.
CANCEL = """
for i = 2, #ARGV, 3 do
  local number, attempt = ARGV[i], ARGV[i + 1]
  local last = redis.call('HGET', KEYS[1], number)
  local done = last and string.sub(last, 1, 4) == 'done'
  local claimed = last and not done and tonumber(string.match(last, '^%d+')) >= tonumber(attempt)
  if not done and (not claimed or ARGV[1] == 'gone') then
    redis.call('HSET', KEYS[1], number, attempt)
    redis.call('ZREM', KEYS[4], number .. '.' .. attempt)
    redis.call('XADD', KEYS[3], '*', 'e', ARGV[i + 2])
  elseif claimed and ARGV[1] == 'stop' then redis.call('SADD', KEYS[2], number) end
end
"""

#: KEYS attempts; ARGV number attempt each: where this attempt has ended the trial, another one may follow.
REOPEN = """
for i = 1, #ARGV, 2 do
  local last = redis.call('HGET', KEYS[1], ARGV[i])
  local ended = 'done:' .. ARGV[i + 1] .. ':'
  if last and string.sub(last, 1, #ended) == ended then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
"""
