-- Return whether a running trial should stop: 'ok' (no), 'cancel' (yes), or 'prune' (yes, because of its reports).
local function told(cancel, number)
  if redis.call('SISMEMBER', cancel, number) == 0 then return 'ok' end
  return redis.call('SISMEMBER', cancel, number .. ':pruned') == 1 and 'prune' or 'cancel'
end
