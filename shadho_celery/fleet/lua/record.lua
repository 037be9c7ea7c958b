-- Return the record of a trial: its value in `attempts` (the first key), 'done' if it is in `done` (the last key), or
-- false.
local function record(number)
  local last = redis.call('HGET', KEYS[1], number)
  -- Bits have offsets below 2^32.
  return last or tonumber(number) < 4294967296 and redis.call('GETBIT', KEYS[#KEYS], number) == 1 and 'done'
end

-- Return the numbers of the attempts in a trial's record: first the latest claimed or void attempt, then earlier
-- attempts that still run.
local function named(record)
  local found = {}
  for each in string.gmatch((string.gsub(record, ':[^+]*', '')), '%d+') do found[#found + 1] = each end
  return found
end

-- Return the attempts in a record that have a live lease, except `attempt`, as a record's last part:
-- '+1+2' for attempts 1 and 2, '' for none. No loop may run up to a number from a message, which may be large, because
-- Redis does nothing else while a script runs.
local function beside(known, leases, number, attempt)
  local live = ''
  for _, each in ipairs(named(known)) do
    local lease = each ~= attempt and redis.call('ZSCORE', leases, number .. '.' .. each)
    if lease and tonumber(lease) > 0 then live = live .. '+' .. each end
  end
  return live
end
