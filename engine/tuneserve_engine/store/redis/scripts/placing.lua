-- The placement of models and jobs with workers.
local placing = {}

local function lanes_key(epoch) return P .. 'lanes:' .. epoch end
local function waiting_lanes_key(base) return P .. 'waiting-lanes:' .. base end
local function waiting_jobs_key(base) return P .. 'waiting-jobs:' .. base end

local function samples_of(epoch) return number(call('HGET', worker_key(epoch), 'samples')) end

-- How fast a worker trains, relative to others. Workers with 0 come first for samples, and get no
-- models.
local function speed_of(epoch) return number(call('HGET', worker_key(epoch), 'speed') or '1') end

-- Returns the live workers of a base model, the lowest epoch first.
function placing.workers(base)
  local found = {}
  for _, epoch in ipairs(call('ZRANGE', P .. 'workers', 0, -1)) do
    if call('HGET', worker_key(epoch), 'base') == base then
      found[#found + 1] = epoch
    end
  end
  table.sort(found, function(a, b) return tonumber(a) < tonumber(b) end)
  return found
end

local function least(epochs, load)
  local best, lowest
  for _, epoch in ipairs(epochs) do
    local its = load(epoch)
    if not best or its < lowest then
      best, lowest = epoch, its
    end
  end
  return best, lowest
end

-- Returns the workers of a base model that only sample, and the others.
local function sorted_out(base)
  local samplers, trainers = {}, {}
  for _, epoch in ipairs(placing.workers(base)) do
    local its = speed_of(epoch) == 0 and samplers or trainers
    its[#its + 1] = epoch
  end
  return samplers, trainers
end

-- Returns {epoch, speed, number of models} of the workers of a base model that train.
function placing.trainers(base)
  local _, found = sorted_out(base)
  for i, epoch in ipairs(found) do
    found[i] = { epoch, speed_of(epoch), call('SCARD', lanes_key(epoch)) }
  end
  return found
end

-- The unfinished sequences of one sampling session that stay together. A worker that has so many
-- more sequences than the average is passed over.
local SEQUENCES_TOGETHER = 16

-- Returns the worker of a base model for a sample of this sampling session. The first sequences of a
-- session with a snapshot go to one worker, which then loads the snapshot once: to the one that has
-- it for unfinished samples of the session, or else the worker of the session's first model, unless
-- it is passed over. All others go to the worker with the fewest sequences.
local function worker_for_sample(base, scope)
  local samplers, trainers = sorted_out(base)
  local epochs = #samplers > 0 and samplers or trainers
  local chosen = least(epochs, samples_of)
  local together = call('HGET', P .. 'sampling', scope)
  if not chosen or not together or number(together) > SEQUENCES_TOGETHER then
    return chosen
  end
  local samples, sum = {}, 0
  for _, epoch in ipairs(epochs) do
    samples[epoch] = samples_of(epoch)
    sum = sum + samples[epoch]
  end
  local session = string.match(scope, '^(.*):sample:')
  local home = session and call('HGET', lane_key(session .. ':train:0'), 'worker')
  for _, epoch in ipairs({ call('HGET', P .. 'sampling-at', scope) or '', home or '' }) do
    if samples[epoch] and samples[epoch] < SEQUENCES_TOGETHER + sum / #epochs then
      chosen = epoch
      break
    end
  end
  call('HSET', P .. 'sampling-at', scope, chosen)
  return chosen
end

-- Updates the sets that a lane belongs to after a change of its worker or its jobs.
local function settle_lane(model)
  local lane = call('HMGET', lane_key(model), 'jobs', 'worker', 'tenant', 'base')
  local jobs, worker, tenant = number(lane[1]), lane[2], lane[3]
  if tenant then
    local mark = (jobs > 0 or worker) and 'SADD' or 'SREM'
    call(mark, P .. 'active:' .. tenant, model)
  end
  if worker or call('ZCARD', ready_key(model)) == 0 then
    call('SREM', waiting_lanes_key(lane[4] or ''), model)
  else
    call('SADD', waiting_lanes_key(lane[4] or ''), model)
  end
end

-- Places a model with the one of these workers that then has the fewest for its speed, if there are
-- any. Returns its epoch.
local function place_lane(model, trainers)
  local best = least(trainers, function(its) return (1 + its[3]) / its[2] end)
  if best then
    best[3] = best[3] + 1
    call('HSET', lane_key(model), 'worker', best[1])
    call('SADD', lanes_key(best[1]), model)
    return best[1]
  end
end

-- Places a model without jobs.
function placing.place_idle(model)
  place_lane(model, placing.trainers(call('HGET', lane_key(model), 'base') or ''))
  settle_lane(model)
end

-- Gives a job the next place in the order of execution, and a worker if there is one.
function placing.place(id)
  local job = call('HMGET', job_key(id), 'model', 'base', 'scope')
  local model, base = job[1], job[2]
  local release = call('HINCRBY', META, 'releases', 1)
  local epoch
  if model then
    call('ZADD', ready_key(model), release, id)
    epoch = call('HGET', lane_key(model), 'worker')
      or place_lane(model, placing.trainers(base))
    settle_lane(model)
  else
    epoch = worker_for_sample(base, job[3])
    if epoch then
      call('HINCRBY', worker_key(epoch), 'samples', call('HGET', job_key(id), 'sequences') or 1)
    else
      call('ZADD', waiting_jobs_key(base), release, id)
    end
  end
  call('HSET', job_key(id), 'state', 'ready', 'release', release, 'worker', epoch or '')
  if epoch then
    call('ZADD', queue_key(epoch), release, id)
    news.placed = true
  end
end

-- Takes a released job out of every queue.
function placing.withdraw(id)
  local job = call('HMGET', job_key(id), 'model', 'base', 'worker')
  local model, base, epoch = job[1], job[2], job[3]
  if epoch ~= '' then
    call('ZREM', queue_key(epoch), id)
  end
  if model then
    call('ZREM', ready_key(model), id)
  elseif epoch == '' then
    call('ZREM', waiting_jobs_key(base), id)
  elseif is_live(epoch) then
    local sequences = call('HGET', job_key(id), 'sequences') or 1
    call('HINCRBY', worker_key(epoch), 'samples', 0 - number(sequences))
  end
end

-- Takes a lane from its worker. Its jobs are still in the worker's queue.
local function take_lane(model)
  local epoch = call('HGET', lane_key(model), 'worker')
  if epoch then
    call('SREM', lanes_key(epoch), model)
  end
  call('HDEL', lane_key(model), 'worker', 'park')
end

-- Gives a lane up; its jobs are placed again.
function placing.release(model)
  local epoch = call('HGET', lane_key(model), 'worker')
  local ids = call('ZRANGE', ready_key(model), 0, -1)
  take_lane(model)
  for _, id in ipairs(ids) do
    if epoch then
      call('ZREM', queue_key(epoch), id)
    end
    placing.place(id)
  end
  settle_lane(model)
end

-- Ends a lease. Its models and jobs have no worker until they are placed again. Adds its idle models
-- to `orphans`, by base model.
function placing.end_lease(epoch, orphans)
  local worker = call('HMGET', worker_key(epoch), 'name', 'base')
  if call('HGET', P .. 'names', worker[1]) == epoch then
    call('HDEL', P .. 'names', worker[1])
  end
  call('ZREM', P .. 'workers', epoch)
  for _, id in ipairs(call('ZRANGE', queue_key(epoch), 0, -1)) do
    local job = call('HMGET', job_key(id), 'model', 'base', 'release')
    call('HSET', job_key(id), 'worker', '')
    if not job[1] then
      call('ZADD', waiting_jobs_key(job[2]), job[3], id)
    end
  end
  local idle = orphans[worker[2]] or {}
  orphans[worker[2]] = idle
  for _, model in ipairs(call('SMEMBERS', lanes_key(epoch))) do
    local lane = call('HMGET', lane_key(model), 'park', 'jobs')
    if not lane[1] and number(lane[2]) == 0 then
      idle[#idle + 1] = model
    end
    take_lane(model)
    settle_lane(model)
  end
  call('DEL', worker_key(epoch), queue_key(epoch), lanes_key(epoch), cancelled_key(epoch),
    P .. 'running:' .. epoch)
  news.placed = true
end

-- Places the idle models of ended leases, and all jobs that wait, with the workers that are there.
function placing.place_orphans(orphans)
  local bases = {}
  for base in pairs(orphans) do
    bases[#bases + 1] = base
  end
  table.sort(bases)
  for _, base in ipairs(bases) do
    local idle, trainers = orphans[base], placing.trainers(base)
    table.sort(idle)
    for _, model in ipairs(idle) do
      place_lane(model, trainers)
      settle_lane(model)
    end
    placing.place_waiting(base)
  end
end

-- Places the jobs that wait for a worker of this base model, in their old order, if there is one.
function placing.place_waiting(base)
  if #placing.workers(base) == 0 then
    return
  end
  local ids = call('ZRANGE', waiting_jobs_key(base), 0, -1)
  call('DEL', waiting_jobs_key(base))
  for _, model in ipairs(call('SMEMBERS', waiting_lanes_key(base))) do
    for _, id in ipairs(call('ZRANGE', ready_key(model), 0, -1)) do
      ids[#ids + 1] = id
    end
  end
  local release = {}
  for _, id in ipairs(ids) do
    release[id] = number(call('HGET', job_key(id), 'release'))
  end
  table.sort(ids, function(a, b) return release[a] < release[b] end)
  for _, id in ipairs(ids) do
    placing.place(id)
  end
end
