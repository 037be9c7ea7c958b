-- Return what is known of a trial: its value in `attempts`, the first key; 'done' if it is in `done`, the last key.
local function record(number)
  local last = redis.call('HGET', KEYS[1], number)
  -- Bits have offsets below 2^32.
  return last or tonumber(number) < 4294967296 and redis.call('GETBIT', KEYS[#KEYS], number) == 1 and 'done'
end

-- Return the attempts that a trial's record names: the latest one that is claimed or void, then earlier ones beside it.
local function named(record)
  local found = {}
  for each in string.gmatch((string.gsub(record, ':[^+]*', '')), '%d+') do found[#found + 1] = each end
  return found
end

-- Return the named attempts but for one that have a live lease, as a record ends with them: '+1+2', or ''.
-- Never loop to a number of a message: Redis does nothing else meanwhile.
local function beside(known, leases, number, attempt)
  local live = ''
  for _, each in ipairs(named(known)) do
    local lease = each ~= attempt and redis.call('ZSCORE', leases, number .. '.' .. each)
    if lease and tonumber(lease) > 0 then live = live .. '+' .. each end
  end
  return live
end
