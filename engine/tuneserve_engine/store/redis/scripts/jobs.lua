-- Jobs: held (waits for a missing position) -> ready (released) -> done -> expired -> forgotten.
-- The hash of an ended job stays for a while, so that its key is known; only short fields stay in
-- it.
local jobs = {}

local function is_unfinished(state) return state == 'held' or state == 'ready' end

-- Counts unfinished jobs and the bytes of their payloads, for the server, a tenant and a model.
local function count(tenant, model, jobs_by, bytes_by)
  local scopes = { META, tenant_key(tenant) }
  if model then
    scopes[3] = lane_key(model)
  end
  for _, scope in ipairs(scopes) do
    call('HINCRBY', scope, 'jobs', jobs_by)
    call('HINCRBY', scope, 'bytes', bytes_by)
  end
end

-- Shrinks an expired job to the fields that identify it: its tenant, its key and its kind. After
-- that it may be forgotten. Does nothing while replay needs the job, or while its lane has yet to
-- pass its position.
local function shrink(id)
  local at = job_key(id)
  local job = call('HMGET', at, 'state', 'model', 'finished')
  if job[1] ~= 'expired' or call('EXISTS', payload_key(id)) == 1 then
    return
  end
  if job[2] and call('ZSCORE', ahead_key(job[2]), id) then
    return
  end
  call('ZADD', P .. 'expired', job[3], id)
  call('HDEL', at, 'model', 'position', 'created', 'finished', 'size', 'release', 'worker',
    'attempts', 'category', 'ctype', 'digest', 'halvings', 'trace', 'sequences')
  if call('HEXISTS', at, 'counted') == 1 then -- otherwise its worker may still report usage
    call('HDEL', at, 'base')
  end
end

-- Ends the wait of a new model for room, if it waits.
function jobs.no_longer_waits(id, model)
  if call('ZREM', P .. 'creating', id) == 1 then
    call('HDEL', lane_key(model), 'waits')
  end
end

-- Releases the contiguous run of jobs from `position` on. Spent positions count as present, and are
-- taken from their jobs.
function jobs.advance(model, position)
  local ahead = ahead_key(model)
  while true do
    local first = call('ZRANGE', ahead, 0, 0, 'WITHSCORES')
    if not first[1] or number(first[2]) > position then
      break
    end
    call('ZREM', ahead, first[1])
    if call('HGET', job_key(first[1]), 'state') == 'held' then
      call('ZREM', P .. 'held', first[1])
      placing.place(first[1])
    else
      shrink(first[1])
    end
    if number(first[2]) == position then
      position = position + 1
    end
  end
  call('HSET', lane_key(model), 'next', position)
end

-- Returns the client of a sample; nil for a job of another kind, or an unknown job.
function jobs.client(id)
  local job = call('HMGET', job_key(id), 'kind', 'tenant', 'scope', 'seq')
  return job[1] == 'sample' and client_of(job[2], job[3], job[4]) or nil
end

-- Stores how a job ended, and announces it.
-- how: error and category, or ctype and body; digest and halvings of a job that is kept for replay.
local function store(id, how)
  local at = job_key(id)
  call('HSET', at, 'state', 'done', 'finished', NOW)
  if how.error then
    call('HSET', at, 'category', how.category)
    call('SET', result_key(id), how.error)
  else
    call('HSET', at, 'ctype', how.ctype)
    call('SET', result_key(id), how.body)
  end
  call('ZADD', P .. 'ended', NOW, id)
  news.ended[#news.ended + 1] = id
  local client = jobs.client(id)
  if client then
    call('ZADD', completions_key(client), call('HINCRBY', META, 'completions', 1), id)
    news.completed[client] = true
  end
end

-- Stores a new job and counts it as unfinished; a job with an error ends at once. Then releases the
-- jobs that waited for it, unless it has to wait for room. The lane of its model exists already.
function jobs.enter(job, payload)
  local at = job_key(job.id)
  call('HSET', at, unpack(job.fields))
  call('HSET', seqs_key(job.tenant, job.scope), job.seq, job.id)
  call('SADD', P .. 'tenants', job.tenant)
  if job.error then
    store(job.id, job)
  else
    call('HSET', at, 'state', 'held', 'created', NOW, 'size', #payload)
    call('SET', payload_key(job.id), payload)
    count(job.tenant, job.model, 1, #payload)
    if job.model then
      settle_lane(job.model)
    end
    if job.file then
      call('HSET', P .. 'files', job.id, job.file)
    end
    if job.kind == 'sample' then
      call('ZADD', P .. 'samples', NOW, job.id)
      if job.snapshot then
        local sequences = number(call('HGET', at, 'sequences'))
        call('HINCRBY', P .. 'sampling', job.scope, sequences)
      end
    elseif job.kind == 'save_weights' then
      call('HSET', saving_key(job.tenant), job.id, job.saves and job.saves.size_bytes or 0)
    end
  end
  local following = job.position and number(call('HGET', lane_key(job.model), 'next'))
  if following and job.position >= following then
    call('ZADD', ahead_key(job.model), job.position, job.id)
    if job.waits then
      call('ZADD', P .. 'creating', call('HINCRBY', META, 'creating', 1), job.id)
      call('HSET', lane_key(job.model), 'waits', 1)
    elseif job.position == following then
      jobs.advance(job.model, following)
      return
    end
  end
  if not job.error then
    if following then
      call('ZADD', P .. 'held', NOW, job.id)
    else
      placing.place(job.id)
    end
  end
end

-- Drops the payload of a job that will not be replayed.
local function drop_payload(id)
  call('DEL', payload_key(id))
  call('HDEL', P .. 'files', id)
  shrink(id)
end

-- Drops the result of a job.
function jobs.expire(id)
  call('HSET', job_key(id), 'state', 'expired')
  call('DEL', result_key(id), cost_key(id))
  call('ZREM', P .. 'ended', id)
  shrink(id)
end

-- Forgets a job that has shrunk.
function jobs.forget(id)
  local client = jobs.client(id)
  if client then
    call('ZREM', completions_key(client), id)
  end
  local key = call('HMGET', job_key(id), 'tenant', 'scope', 'seq')
  call('HDEL', seqs_key(key[1], key[2]), key[3])
  call('DEL', job_key(id))
  call('ZREM', P .. 'expired', id)
end

-- Ends an unfinished job. The job is kept for replay if it changed its model's state.
function jobs.finish(id, how)
  local at = job_key(id)
  local job = call('HMGET', at, 'state', 'tenant', 'model', 'size', 'position', 'kind', 'scope')
  local model = job[3]
  if job[1] == 'held' then
    call('ZREM', P .. 'held', id)
    jobs.no_longer_waits(id, model)
  else
    placing.withdraw(id)
  end
  if job[6] == 'sample' then
    call('ZREM', P .. 'samples', id)
    local sequences = call('HGET', at, 'sequences')
    if sequences and call('HEXISTS', P .. 'sampling', job[7]) == 1
        and call('HINCRBY', P .. 'sampling', job[7], 0 - number(sequences)) <= 0 then
      call('HDEL', P .. 'sampling', job[7])
      call('HDEL', P .. 'sampling-at', job[7])
    end
  elseif job[6] == 'save_weights' then
    call('HDEL', saving_key(job[2]), id)
  end
  count(job[2], model, -1, 0 - number(job[4]))
  if model then
    settle_lane(model)
  end
  if job[6] == 'save_weights' and how.error then -- it may have written its file
    local file_id = call('HGET', P .. 'files', id)
    if file_id and file_id ~= '?' then
      release(file_id)
    end
  end
  if how.digest and not how.error and job[5] then
    call('HSET', at, 'digest', how.digest, 'halvings', how.halvings)
    call('ZADD', log_key(model), job[5], id)
    call('SADD', P .. 'logged', model)
    if job[6] ~= 'load_weights' then
      call('HDEL', P .. 'files', id)
    end
  else
    drop_payload(id)
  end
  store(id, how)
  if job[6] == 'unload_model' and model then
    jobs.unloaded(model)
    records.forget_orphan(model)
  end
end

-- Ends an unfinished sample; its worker learns of it with the next renewal.
function jobs.drop(id, how)
  local worker = call('HGET', job_key(id), 'worker')
  jobs.finish(id, how)
  if worker and worker ~= '' then
    call('RPUSH', cancelled_key(worker), id)
  end
end

-- Ends the unfinished jobs of a model that accepts no more; with `held`, only those that wait for a
-- gap.
function jobs.finish_all(model, how, held)
  local ids = held and {} or call('ZRANGE', ready_key(model), 0, -1)
  for _, id in ipairs(call('ZRANGE', ahead_key(model), 0, -1)) do
    ids[#ids + 1] = id
  end
  for _, id in ipairs(ids) do
    if is_unfinished(call('HGET', job_key(id), 'state')) then
      jobs.finish(id, how)
    end
  end
  local ahead = call('ZRANGE', ahead_key(model), 0, -1)
  call('DEL', ahead_key(model))
  for _, id in ipairs(ahead) do
    shrink(id)
  end
end

-- Drops the payloads of done jobs that no kept point needs.
function jobs.trim(model, before)
  for _, id in ipairs(call('ZRANGEBYSCORE', log_key(model), '-inf', '(' .. before)) do
    drop_payload(id)
  end
  call('ZREMRANGEBYSCORE', log_key(model), '-inf', '(' .. before)
  if call('EXISTS', log_key(model)) == 0 then
    call('SREM', P .. 'logged', model)
  end
end

-- Drops a model's recovery points and payloads, and takes it from its worker.
function jobs.unloaded(model)
  jobs.trim(model, '+inf')
  release_points(model, 0)
  call('DEL', points_key(model))
  call('SREM', P .. 'pointed', model)
  placing.release(model)
end
