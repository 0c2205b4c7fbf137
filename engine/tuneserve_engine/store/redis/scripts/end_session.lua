-- flags: allow-oom
-- uses: records recordings placing jobs
-- Ends a session that was last seen before a time. {'ended'}: it has ended, now or earlier, or was
-- seen since. {'models'}: it has a model that the caller did not know. {'more'}: this step changed
-- `most` of its records, and there may be more.
-- models: for each, its unload job and the error for its held jobs.
local key, reason, before = ARGV[2], ARGV[3], number(ARGV[4])
local models, most = cmsgpack.unpack(ARGV[5]), number(ARGV[6])

local session = call('HMGET', record_key('session', key), 'ended', 'last_seen_s', 'key')
if session[1] ~= 'null' or tonumber(session[2]) >= before then
  return { 'ended' }
end
local parent = session[3]
for _, model in ipairs(records.under('model', parent)) do
  if not models[model] then
    return { 'models' }
  end
end

local deleted = 0
for _, type in ipairs({ 'sampler', 'custom_loss' }) do
  if deleted < most then
    for _, owned in ipairs(records.under(type, parent, most - deleted)) do
      records.delete(type, owned)
      deleted = deleted + 1
    end
  end
end
if deleted + recordings.end_session(key, most) >= most then
  return { 'more' }
end
records.put('session', key, { 'ended', reason })
for _, model in ipairs(records.under('model', parent)) do
  local its = models[model]
  if is_alive(call('HGET', record_key('model', model), 'status')) then
    records.put('model', model, { 'status', '"ended"', 'ended', reason })
    jobs.finish_all(model, its.held, true)
  end
  local lane = call('HMGET', lane_key(model), 'worker', 'jobs', 'base')
  if not lane[1] and number(lane[2]) == 0 then
    jobs.unloaded(model)
  elseif call('EXISTS', job_key(its.unload.id)) == 0 then
    its.unload.fields[#its.unload.fields + 1] = 'base'
    its.unload.fields[#its.unload.fields + 1] = lane[3]
    call('HDEL', lane_key(model), 'park')
    call('HSET', lane_key(model), 'requested', NOW)
    jobs.enter(its.unload, '')
  end
end
announce()
return { 'ended' }
