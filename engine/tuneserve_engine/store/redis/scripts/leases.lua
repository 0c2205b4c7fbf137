-- The leases of workers.
local leases = {}

-- Notes a sign of life of a worker.
function leases.see(epoch)
  call('ZADD', P .. 'workers', NOW, epoch)
  call('HSET', P .. 'served-seen', call('HGET', worker_key(epoch), 'base'), NOW)
end

-- If no worker was heard of for half the time to live, the store was away, and no lease has run
-- out. A sign of life in the future is from before the clock was set back: its time runs from now.
function leases.forgive(ttl)
  for _, epoch in ipairs(call('ZRANGEBYSCORE', P .. 'workers', '(' .. NOW, '+inf')) do
    call('ZADD', P .. 'workers', NOW, epoch)
  end
  if tonumber(NOW) - number(call('HGET', META, 'heard')) > ttl / 2 then
    for _, epoch in ipairs(call('ZRANGE', P .. 'workers', 0, -1)) do
      leases.see(epoch)
    end
  end
  call('HSET', META, 'heard', NOW)
end

-- Marks a model as failed if its creation has ended for good without success.
local function fail_if_never_created(model, failed)
  if call('HGET', record_key('model', model), 'status') == '"creating"' then
    records.put('model', model, { 'status', '"failed"' })
    jobs.finish_all(model, { error = failed[1] .. model .. failed[2], category = 'user' })
    jobs.unloaded(model)
  end
end

-- Ends the lease of a worker that died. Counts an attempt for each job that it ran, and ends those
-- with too many. Attempts that were killed from outside are also counted apart.
-- orphans: as for end_lease. policy: ttl; attempts, the limit without kills; deaths, the limit with
-- kills; fatal, the error of the last attempt, in two parts around the number of deaths;
-- failed, the error of a model that was never created, in two parts around its name.
function leases.died(epoch, orphans, policy, is_killed)
  local running = call('GET', P .. 'running:' .. epoch) or ''
  for id in string.gmatch(running, '%S+') do
    local job = call('HMGET', job_key(id), 'state', 'worker', 'model')
    if job[1] == 'ready' and job[2] == epoch then
      local deaths = call('HINCRBY', job_key(id), 'attempts', 1)
      local kills = call('HINCRBY', job_key(id), 'kills', is_killed and 1 or 0)
      if deaths - kills >= policy.attempts or deaths >= policy.deaths then
        local fatal = policy.fatal[1] .. deaths .. policy.fatal[2]
        jobs.finish(id, { error = fatal, category = 'server' })
        if job[3] then
          fail_if_never_created(job[3], policy.failed)
        end
      end
    end
  end
  placing.end_lease(epoch, orphans)
end
