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
  local latest = tonumber(last and string.match(last, '^%d+') or attempt)
  for each = 1, failure == '' and 0 or latest do
    local other = each ~= tonumber(attempt) and redis.call('ZSCORE', KEYS[2], number .. '.' .. each)
    if other and tonumber(other) > 0 then
      -- It did not end well, and a copy of it may: that one decides.
      redis.call('ZREM', KEYS[2], number .. '.' .. attempt)
      judge(failure)
      return 1
    end
  end
  redis.call('HSET', KEYS[1], number, mine)
  for each = 1, latest do
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

#: KEYS attempts; ARGV number attempt each: where this attempt or an earlier one has ended the trial, later ones may
#: follow.
REOPEN = """
for i = 1, #ARGV, 2 do
  local last = redis.call('HGET', KEYS[1], ARGV[i])
  local ended = last and string.match(last, '^done:(%d+):')
  if ended and tonumber(ended) <= tonumber(ARGV[i + 1]) then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
"""

#: What the scripts on seats share: whether an attempt runs, as far as anybody knows. KEYS 1 and 2: attempts leases.
_RUNS = (
    _NOW
    + """
local function runs(number, attempt)
  local last = redis.call('HGET', KEYS[1], number)
  local lease = redis.call('ZSCORE', KEYS[2], number .. '.' .. attempt)
  -- Without any record Redis has lost its memory; what runs will be known again at its next renewal.
  if not last then return 'perhaps' end
  return string.sub(last, 1, 4) ~= 'done' and lease and tonumber(lease) > 0
end
"""
)

#: KEYS attempts leases events gangs; ARGV number attempt call sealed: the attempt calls for replicas.
CALL = (
    _RUNS
    + """
if not runs(ARGV[1], ARGV[2]) then return 0 end
redis.call('HSET', KEYS[4], ARGV[1] .. '.' .. ARGV[2], ARGV[3] .. ' ' .. ARGV[4])
redis.call('XADD', KEYS[3], '*', 'e', ARGV[4])
return 1
"""
)

#: KEYS attempts leases cancel gangs seats strikes yields; ARGV lease_ms delivery worker strikes number attempt call
#: rank. Takes a seat. Returns 1: taken; 0: refused, for its attempt does not run, or another holds it; -1: the worker
#: must wait.
TAKE = (
    _RUNS
    + """
local number, attempt, call = ARGV[5], ARGV[6], ARGV[7]
local seat = number .. '.' .. attempt .. '.' .. call .. '.' .. ARGV[8]
if runs(number, attempt) ~= true or redis.call('SISMEMBER', KEYS[3], number) == 1 then return 0 end
if redis.call('SISMEMBER', KEYS[7], seat) == 1 then return 0 end
local latest = redis.call('HGET', KEYS[4], number .. '.' .. attempt)
if latest and string.match(latest, '^%d+') ~= call then return 0 end
local seated = redis.call('HGET', KEYS[5], seat)
local lasts, holder = string.match(seated or '', '^held:(%d+):(.*)$')
if holder == ARGV[2] then return 1 end
if seated == 'done' or (holder and tonumber(lasts) > now) then return 0 end
local strikes = redis.call('HGET', KEYS[6], ARGV[3])
if strikes and (strikes == 'fenced' or tonumber(strikes) >= tonumber(ARGV[4])) then return -1 end
redis.call('HSET', KEYS[5], seat, 'held:' .. string.format('%.0f', now + ARGV[1]) .. ':' .. ARGV[2])
return 1
"""
)

#: KEYS attempts leases cancel seats yields; ARGV lease_ms, then number attempt seat delivery each. Renews; returns per
#: seat 'ok', 'gone' where the replica is to stop, or 'yield' where its slot is wanted.
RENEW_SEATS = (
    _RUNS
    + """
local answer = {}
for i = 2, #ARGV, 4 do
  local number, attempt, seat, delivery = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local seated = redis.call('HGET', KEYS[4], seat)
  local mine = not seated or string.match(seated, '^held:%d+:(.*)$') == delivery
  if not (mine and runs(number, attempt)) or redis.call('SISMEMBER', KEYS[3], number) == 1 then
    answer[#answer + 1] = 'gone'
  else
    redis.call('HSET', KEYS[4], seat, 'held:' .. string.format('%.0f', now + ARGV[1]) .. ':' .. delivery)
    answer[#answer + 1] = redis.call('SISMEMBER', KEYS[5], seat) == 1 and 'yield' or 'ok'
  end
end
return answer
"""
)

#: KEYS attempts leases events seats yields; ARGV number attempt seat delivery how event: its replica has ended, 'left'
#: or 'done'; the event may be ''. Returns 1, or 0 where nobody wants to know: the attempt has ended before.
LEAVE = (
    _RUNS
    + """
local seated = redis.call('HGET', KEYS[4], ARGV[3])
redis.call('SREM', KEYS[5], ARGV[3])
if not (seated and string.match(seated, '^held:%d+:(.*)$') == ARGV[4] and runs(ARGV[1], ARGV[2])) then return 0 end
redis.call('HSET', KEYS[4], ARGV[3], ARGV[5])
if ARGV[6] ~= '' then redis.call('XADD', KEYS[3], '*', 'e', ARGV[6]) end
return 1
"""
)

#: KEYS seats; ARGV seat each. Returns how each stands: 'never' taken, 'held', 'lost', 'left' or 'done'.
SEATED = (
    _NOW
    + """
local answer = {}
for i = 1, #ARGV do
  local seated = redis.call('HGET', KEYS[1], ARGV[i])
  local lasts = string.match(seated or '', '^held:(%d+):')
  answer[i] = lasts and (tonumber(lasts) > now and 'held' or 'lost') or seated or 'never'
end
return answer
"""
)
