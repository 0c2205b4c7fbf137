-- flags: allow-oom
-- uses: records recordings placing jobs usage
-- Stores how jobs ended, with the record changes of their outcomes. Changes nothing if a job is
-- placed elsewhere: {'fenced', job's id}.
local epoch = ARGV[2]
local outcomes = cmsgpack.unpack(ARGV[3])
local MOST_POINTS, RECORDING_BYTES = number(ARGV[4]), number(ARGV[5])
local spent = {} -- by tenant and name: one call's outcomes have few of them

local function foreign()
  for _, outcome in ipairs(outcomes) do
    local job = call('HMGET', job_key(outcome.id), 'state', 'worker')
    if is_unfinished(job[1]) and job[2] ~= epoch then
      return outcome.id
    end
  end
end

local function checkpoint_is_taken(outcome)
  if not outcome.checkpoint or outcome.overwrite then
    return false
  end
  local expires = call('HGET', record_key('checkpoint', outcome.checkpoint.key), 'expires_s')
  return expires and (expires == 'null' or tonumber(expires) > tonumber(NOW))
end

-- The records that come with a result.
local function put_records(outcome)
  local checkpoint, sampler = outcome.checkpoint, outcome.sampler
  if checkpoint then
    records.delete('checkpoint', checkpoint.key) -- an overwritten checkpoint is listed as new
    records.put('checkpoint', checkpoint.key, checkpoint.fields)
  end
  if sampler then
    local ended = call('HGET', record_key('session', sampler.parent), 'ended')
    if not ended or ended == 'null' then
      records.put('sampler', sampler.key, sampler.fields)
    else
      for i = 1, #sampler.fields, 2 do
        if sampler.fields[i] == 'file_id' then
          release_of_record('sampler', sampler.fields[i + 1])
        end
      end
    end
  end
end

-- Collects an outcome's usage in `spent`, which is added to the sums at the end.
local function account(outcome)
  if not outcome.usage or not usage.note(outcome.id, outcome.usage) then
    return
  end
  local job = call('HMGET', job_key(outcome.id), 'tenant', 'model', 'base')
  local name = job[2] or job[3] or ''
  local key = #job[1] .. ':' .. job[1] .. name
  local of = spent[key] or { tenant = job[1], name = name, sums = {} }
  for what, sum in pairs(outcome.sums) do
    of.sums[what] = (of.sums[what] or 0) + sum
  end
  spent[key] = of
end

local function finish(outcome, body, recording)
  if not is_unfinished(call('HGET', job_key(outcome.id), 'state')) then
    return
  end
  if not outcome.error and checkpoint_is_taken(outcome) then
    outcome.error, outcome.category = outcome.exists, 'user'
  end
  if not outcome.error then
    put_records(outcome)
  end
  outcome.body = body
  local model = outcome.point and not outcome.error and call('HGET', job_key(outcome.id), 'model')
  if model then
    usage.draw(model, outcome.point, MOST_POINTS)
  end
  jobs.finish(outcome.id, outcome)
  if #recording > 0 and not outcome.error then
    recordings.put(outcome.id, recording, RECORDING_BYTES)
  end
  for _, update in ipairs(outcome.updates) do
    records.update(update.type, update.key, update.fields, update.entries)
    local ends = update.ends
    if ends and call('HGET', record_key('model', update.key), 'status') == ends.status then
      jobs.finish_all(update.key, ends)
      if ends.status == '"failed"' then
        jobs.unloaded(update.key)
      else
        placing.release(update.key)
      end
    end
  end
end

if not is_live(epoch) then
  return { 'fenced' }
end
local other = foreign()
if other then
  return { 'fenced', other }
end
for i, outcome in ipairs(outcomes) do
  finish(outcome, ARGV[5 + i], ARGV[5 + #outcomes + i])
  account(outcome)
end
for _, of in pairs(spent) do
  usage.add(of.tenant, of.name, of.sums)
end
announce()
return { 'finished' }
