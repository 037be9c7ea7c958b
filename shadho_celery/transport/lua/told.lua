-- Return what the worker of a running trial is told: 'ok', 'cancel' (the trial should stop), or 'prune' (for its reports).
local function told(cancel, number)
  if redis.call('SISMEMBER', cancel, number) == 0 then return 'ok' end
  return redis.call('SISMEMBER', cancel, number .. ':pruned') == 1 and 'prune' or 'cancel'
end
