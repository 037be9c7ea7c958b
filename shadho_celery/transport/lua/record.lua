-- Return the attempts that a trial's record names: the latest one that is claimed or void, then earlier ones beside it.
local function named(record)
  local found = {}
  for each in string.gmatch((string.gsub(record, ':[^+]*', '')), '%d+') do found[#found + 1] = each end
  return found
end

-- Return the named attempts but for one that have a live lease, as a record ends with them: '+1+2', or ''.
-- Never loop to a number of a message: Redis does nothing else meanwhile.
local function beside(record, leases, number, attempt)
  local live = ''
  for _, each in ipairs(named(record)) do
    local lease = each ~= attempt and redis.call('ZSCORE', leases, number .. '.' .. each)
    if lease and tonumber(lease) > 0 then live = live .. '+' .. each end
  end
  return live
end
