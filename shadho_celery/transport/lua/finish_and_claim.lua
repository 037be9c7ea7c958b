-- Finish one attempt and claim the next, in one step. Either may be absent: then its three arguments are empty.
--
-- KEYS  1 attempts  2 leases  3 events  4 cancel  5 breakers  6 known  7 done
-- ARGV  1 lease in ms  2 delivery  3 worker  4 strikes that open the worker's circuit breaker
--       5 number  6 attempt  7 sealed Result;  8 number  9 attempt  10 sealed Started of the attempt to claim
--       11 kind of the result's failure: '' for a success, 'unwatched' if it does not count against the worker
-- Returns {finished, claimed}: 1 taken, 0 refused; a claim is -1 if the worker's circuit breaker is open

-- include now
-- include record
local delivery, worker = ARGV[2], ARGV[3]
-- Count a failure of a kind that only this worker has had against it; a success closes its circuit breaker.
local function judge(failure)
  local strikes = redis.call('HGET', KEYS[5], worker)
  if strikes == 'quarantined' then return end
  if failure == '' then
    if strikes then redis.call('HDEL', KEYS[5], worker) end
  elseif failure ~= 'unwatched' and redis.call('SISMEMBER', KEYS[6], failure) == 0 then
    redis.call('HSET', KEYS[5], worker, (tonumber(strikes) or 0) + 1)
    redis.call('EXPIRE', KEYS[5], 604800)
  end
end

local function finish(number, attempt, event, failure)
  local last = record(number)
  local mine = 'done:' .. attempt .. ':' .. delivery
  -- A repeated call: the first answer was lost on the way.
  if last == mine then return 1 end
  local lease = redis.call('ZSCORE', KEYS[2], number .. '.' .. attempt)
  -- Without a record Redis has lost its data; the store takes one result a trial in any case.
  if last and (string.sub(last, 1, 4) == 'done' or not lease or tonumber(lease) == 0) then
    redis.pcall('HINCRBY', KEYS[1], 'refused', 1)
    redis.call('EXPIRE', KEYS[1], 604800)
    return 0
  end
  redis.call('XADD', KEYS[3], '*', 'e', event)
  redis.call('ZREM', KEYS[2], number .. '.' .. attempt)
  -- The rule of core/attempts.py: a success ends the trial, a failure leaves it to the attempts that still run.
  if failure == '' or not last or beside(last, KEYS[2], number, attempt) == '' then
    redis.call('HSET', KEYS[1], number, mine)
    for _, each in ipairs(named(last or '')) do redis.call('ZREM', KEYS[2], number .. '.' .. each) end
    redis.call('SREM', KEYS[4], number)
  end
  judge(failure)
  return 1
end

local function claim(number, attempt, event)
  local last = record(number)
  if last and string.match(last, '^[^+]*') == attempt .. ':' .. delivery then return 1 end
  if last and (string.sub(last, 1, 4) == 'done' or (tonumber(string.match(last, '^%d+')) or 0) >= tonumber(attempt)) then
    return 0
  end
  local strikes = redis.call('HGET', KEYS[5], worker)
  if strikes and (strikes == 'quarantined' or (tonumber(strikes) or 0) >= tonumber(ARGV[4])) then return -1 end
  redis.call('SREM', KEYS[4], number)
  redis.call('ZADD', KEYS[2], now + ARGV[1], number .. '.' .. attempt)
  redis.call('XADD', KEYS[3], '*', 'e', event)
  -- Last: if one of the others fails (a key of a wrong type), the repeated call must not find the claim made.
  redis.call('HSET', KEYS[1], number, attempt .. ':' .. delivery .. beside(last or '', KEYS[2], number, attempt))
  return 1
end

local finished, claimed = 0, 0
if ARGV[5] ~= '' then finished = finish(ARGV[5], ARGV[6], ARGV[7], ARGV[11]) end
if ARGV[8] ~= '' then claimed = claim(ARGV[8], ARGV[9], ARGV[10]) end
-- Leases are a new key, without a time to live, whenever none was there before.
if claimed == 1 and redis.call('TTL', KEYS[2]) < 518400 then
-- include keep
end
return {finished, claimed}
