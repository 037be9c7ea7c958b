-- Return the states of seats.
--
-- KEYS  1 seats
-- ARGV  seats
-- Returns for each seat 'never' (not taken yet), 'taken', 'lost' (not renewed in time), 'left' or 'done'

-- include now
local answer = {}
for i = 1, #ARGV do
  local seated = redis.call('HGET', KEYS[1], ARGV[i])
  local lasts = string.match(seated or '', '^taken:(%d+):')
  answer[i] = lasts and (tonumber(lasts) > now and 'taken' or 'lost') or seated or 'never'
end
return answer
