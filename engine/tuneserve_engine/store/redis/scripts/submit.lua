-- uses: records keeping placing jobs rooms
-- Accepts a job: {'accepted'}, {'waits'} or {'known', id, kind}. Otherwise nothing has changed, and
-- the answer is a limit, or a rule: the caller then submits the job again with that rejection.
-- {'over', scope, what, value, limit}, {'ahead', next position}, {'refusals', level, now};
-- {'ended', session}, {'dead'}, {'late', next position},
-- {'keeps', count, bytes, number of them being saved, most count, most bytes}.
local job = cmsgpack.unpack(ARGV[2])
local payload = ARGV[3]
local new = cmsgpack.unpack(ARGV[4])
local limits = cmsgpack.unpack(ARGV[5])

-- Returns a limit of the job's tenant: its own, or the default.
local function of_tenant(name)
  local own = call('HGET', record_key('tenant', job.tenant), 'max_' .. name)
  return own and own ~= 'null' and tonumber(own) or limits['tenant_' .. name]
end

local function known()
  local id = call('HGET', seqs_key(job.tenant, job.scope), job.seq)
  return id and { 'known', id, call('HGET', job_key(id), 'kind') }
end

-- A new model in an ended session would never be unloaded.
local function ended_session()
  for _, record in ipairs(new) do
    if record.type == 'model' then
      local ended = call('HGET', record_key('session', record.parent), 'ended')
      if ended and ended ~= 'null' then
        return record.parent
      end
    end
  end
end

local function is_dead()
  local status = call('HGET', record_key('model', job.model), 'status')
  local unloads = status == '"ended"' and job.kind == 'unload_model'
  return status and not is_alive(status) and not unloads
end

local function exceeded(scope, key, most)
  local at = call('HMGET', key, 'jobs', 'bytes')
  local count, bytes = number(at[1]), number(at[2])
  if count >= most then
    return { 'over', scope, 'jobs', count, most }
  end
  -- A job that is too large for the limit alone still has to run.
  if count > 0 and bytes + #payload > limits[scope .. '_bytes'] then
    return { 'over', scope, 'bytes', bytes, limits[scope .. '_bytes'] }
  end
end

-- Returns whether all unfinished jobs of the model wait for this one. Without it, none of them
-- would ever end.
local function is_awaited()
  if not job.position then
    return false
  end
  local lane = call('HMGET', lane_key(job.model), 'next', 'jobs')
  return number(lane[1]) == job.position
    and number(lane[2]) > 0
    and call('ZCARD', ready_key(job.model)) == 0
end

local to_park = {}

-- Returns the limit that forbids one more model, even one that waits for room.
local function no_model()
  local waiting, limit = rooms.waiting(job.tenant), of_tenant('models')
  to_park = waiting == 0 and rooms.to_park(job.tenant, limit)
  if not to_park and (waiting >= limits.waiting_models or not job.position) then
    return { 'over', 'tenant', 'models', waiting, limit }
  end
  job.waits = not to_park
end

local function over()
  local found = exceeded('server', META, limits.server_jobs)
  if not found and not is_awaited() then
    found = exceeded('tenant', tenant_key(job.tenant), of_tenant('jobs'))
      or job.model and exceeded('model', lane_key(job.model), limits.model_jobs)
  end
  for _, record in ipairs(new) do
    if not found and record.type == 'model' then
      found = no_model()
    end
  end
  return found
end

-- A leaky bucket for requests that end at once. Its level is the time at which it will be empty.
local function refused_too_often()
  local now, hour = tonumber(NOW), 3600
  local before = number(call('HGET', tenant_key(job.tenant), 'refusals'))
  local level = math.max(math.min(before, now + hour), now) + hour / limits.tenant_refusals
  if level > now + hour and not is_awaited() then
    return { 'refusals', string.format('%.6f', before), NOW }
  end
  level = string.format('%.6f', math.min(level, now + hour))
  call('HSET', tenant_key(job.tenant), 'refusals', level)
end

-- Returns the rule against a save if the tenant keeps too much already.
local function keeps_too_much()
  local saves = job.saves
  if not saves then
    return
  end
  local count, bytes, coming = kept(job.tenant, saves.listed, saves.key)
  local most, most_bytes = of_tenant('checkpoints'), of_tenant('checkpoint_bytes')
  if count >= most or bytes >= most_bytes then
    return { 'keeps', count, string.format('%.0f', bytes), coming, most, string.format('%.0f', most_bytes) }
  end
end

local function refusal()
  local following = job.position and number(call('HGET', lane_key(job.model), 'next'))
  if not job.error then
    local session = ended_session()
    if session then
      return { 'ended', session }
    end
    if job.model and is_dead() then
      return { 'dead' }
    end
    if following and job.position < following then
      return { 'late', following }
    end
    local keeps = keeps_too_much()
    if keeps then
      return keeps
    end
  end
  if following and job.position - following >= limits.model_window then
    return { 'ahead', following }
  end
  if job.error then
    return refused_too_often()
  end
  return over()
end

-- Makes sure that the job's model has a lane, marks it as in use now unless the job has an error,
-- and gives the job the lane's base model.
local function open_lane()
  local lane = lane_key(job.model)
  local base = call('HGET', lane, 'base')
  if not base then
    local stored = call('HGET', record_key('model', job.model), 'base_model')
    base = stored and unquote(stored) or job.base
    call('HSET', lane, 'tenant', job.tenant, 'base', base, 'next', 0, 'requested', NOW)
    call('HSET', lane, 'jobs', 0, 'bytes', 0)
  end
  if not job.error then
    call('HDEL', lane, 'park')
    call('HSET', lane, 'requested', NOW)
  end
  job.fields[#job.fields + 1] = 'base'
  job.fields[#job.fields + 1] = base
end

local earlier = known()
if earlier then
  return earlier
end
if job.error and job.model and is_dead() then
  job.position = nil -- no later job of the model can wait for it
end
earlier = refusal()
if earlier then
  return earlier
end
rooms.park(to_park or {})
if job.model and not job.error and call('EXISTS', record_key('model', job.model)) == 1 then
  records.put('model', job.model, { 'last_request_s', NOW })
end
for _, record in ipairs(job.error and {} or new) do
  records.put(record.type, record.key, record.fields)
end
if job.model then
  open_lane()
end
jobs.enter(job, payload)
announce()
return { job.waits and 'waits' or 'accepted' }
