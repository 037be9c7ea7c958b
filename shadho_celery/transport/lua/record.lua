-- Return what is known of a trial: its value in `attempts`, the first key; 'done' if it is in `done`, the last key.
local function record(number)
  local last = redis.call('HGET', KEYS[1], number)
  -- Bits have offsets below 2^32.
  return last or tonumber(number) < 4294967296 and redis.call('GETBIT', KEYS[#KEYS], number) == 1 and 'done'
end
