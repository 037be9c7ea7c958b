-- Return the states of attempts.
--
-- KEYS  1 attempts  2 leases  3 done
-- ARGV  "number.attempt" of each attempt
-- Returns for each attempt 'leased' (it or its trial's latest attempt has a lease), 'free' (may be claimed) or 'void'

-- include record
local answer = {}
for i = 1, #ARGV do
  local number, attempt = string.match(ARGV[i], '^(%d+)%.(%d+)$')
  local last = record(number)
  local latest = last and string.match(last, '^%d+')
  if redis.call('ZSCORE', KEYS[2], ARGV[i]) then answer[i] = 'leased'
  elseif not last or latest and tonumber(latest) < tonumber(attempt) then answer[i] = 'free'
  -- A later attempt runs, sent by a scheduler with a newer copy of the store.
  elseif latest and redis.call('ZSCORE', KEYS[2], number .. '.' .. latest) then answer[i] = 'leased'
  else answer[i] = 'void' end
end
return answer
