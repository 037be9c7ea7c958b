-- Accept or refuse the results of attempts, and claim other attempts, in one step.
--
-- KEYS  1 attempts  2 leases  3 events  4 cancel  5 breakers  6 known  7 done
-- ARGV  1 duration of a lease in ms  2 delivery  3 worker  4 strikes that open the worker's circuit breaker
--       5 ms for which a half-open breaker allows one trial  6 number of results; then for each result its number,
--       attempt, sealed Result, and the kind of its failure: '' for a success, 'unwatched' for a failure that does not
--       count against the worker; then for each attempt to claim its number, attempt and sealed Started
-- Returns {finished, claimed}, two lists: 1 accepted, 0 refused; in `claimed` also -1 if the worker's breaker is open

-- include now
-- include record
local delivery, worker = ARGV[2], ARGV[3]
-- All events go into one entry of the stream: reading an entry costs the scheduler more than reading an event.
local events = {}
-- Fail now if the stream's key has a wrong type: a result must not be recorded if its event cannot be added.
redis.call('XLEN', KEYS[3])

-- Return the time in ms until which a half-open breaker allows no further trial, or nil if it is not half-open.
local function half_until(strikes)
  return strikes and tonumber(string.match(strikes, '^half:(%d+)$'))
end

-- Count a failure against the worker, unless its kind is known to be caused by the trials. A success resets the count.
local function judge(failure)
  local strikes = redis.call('HGET', KEYS[5], worker)
  if strikes == 'quarantined' then return end
  if failure == '' then
    if strikes then redis.call('HDEL', KEYS[5], worker) end
  elseif failure ~= 'unwatched' and redis.call('SISMEMBER', KEYS[6], failure) == 0 then
    redis.call('HSET', KEYS[5], worker, half_until(strikes) and ARGV[4] or (tonumber(strikes) or 0) + 1)
    redis.call('EXPIRE', KEYS[5], 604800)
  end
end

local function finish(number, attempt, event, failure)
  local last = record(number)
  local mine = 'done:' .. attempt .. ':' .. delivery
  -- The call is repeated because its first answer was lost.
  if last == mine then return 1 end
  local lease = redis.call('ZSCORE', KEYS[2], number .. '.' .. attempt)
  -- If there is no record, Redis has lost its data, and the result is accepted: the store takes one result per trial.
  if last and (string.sub(last, 1, 4) == 'done' or not lease or tonumber(lease) == 0) then
    redis.pcall('HINCRBY', KEYS[1], 'refused', 1)
    redis.call('EXPIRE', KEYS[1], 604800)
    return 0
  end
  events[#events + 1] = event
  redis.call('ZREM', KEYS[2], number .. '.' .. attempt)
  -- The rule of core/attempts.py: a success ends the trial. A failure ends it only if no other attempt of it runs.
  if failure == '' or not last or beside(last, KEYS[2], number, attempt) == '' then
    redis.call('HSET', KEYS[1], number, mine)
    for _, each in ipairs(named(last or '')) do redis.call('ZREM', KEYS[2], number .. '.' .. each) end
    redis.call('SREM', KEYS[4], number, number .. ':pruned')
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
  local busy_until = half_until(strikes)
  if busy_until and now < busy_until then return -1 end
  redis.call('SREM', KEYS[4], number, number .. ':pruned')
  redis.call('ZADD', KEYS[2], now + ARGV[1], number .. '.' .. attempt)
  events[#events + 1] = event
  -- This comes last: if an earlier command fails (a key of a wrong type), a repeated call must not find the claim made.
  redis.call('HSET', KEYS[1], number, attempt .. ':' .. delivery .. beside(last or '', KEYS[2], number, attempt))
  -- Allow only one trial at a time, because a worker with several slots could fail several at once. Allow the next
  -- one after some time, in case this trial is lost.
  if busy_until then redis.call('HSET', KEYS[5], worker, 'half:' .. now + ARGV[5]) end
  return 1
end

local finished, claimed, last = {}, {}, 6 + 4 * ARGV[6]
for i = 7, last, 4 do finished[#finished + 1] = finish(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]) end
for i = last + 1, #ARGV, 3 do claimed[#claimed + 1] = claim(ARGV[i], ARGV[i + 1], ARGV[i + 2]) end
if #events > 0 then redis.call('XADD', KEYS[3], '*', 'e', table.concat(events, '\n')) end
-- The key of the leases has no time to live when its first lease has just created it.
if #claimed > 0 and redis.call('TTL', KEYS[2]) < 518400 then
-- include keep
end
return {finished, claimed}
