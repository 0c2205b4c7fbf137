-- flags: allow-oom
-- uses: records placing jobs
-- Makes a recovery point the newest of its model, keeps the one before, and drops the payloads that
-- neither needs: {'saved'}, or {'refused', {'early', first position that has not ended}}, or
-- {'refused', {'passed', position of the newest}}.
local epoch, model, position, point = ARGV[2], ARGV[3], number(ARGV[4]), ARGV[5]
local points = points_key(model)

local function first_unfinished()
  local first = number(call('HGET', lane_key(model), 'next'))
  for _, id in ipairs(call('ZRANGE', ready_key(model), 0, -1)) do
    local its = call('HGET', job_key(id), 'position')
    if its and tonumber(its) < first then
      first = tonumber(its)
    end
  end
  return first
end

-- Returns whether the model may still be restored, and no other worker has it.
local function is_here()
  local lane = call('HMGET', lane_key(model), 'worker', 'jobs')
  local status = call('HGET', record_key('model', model), 'status')
  if not status or not lane[2] or lane[1] and lane[1] ~= epoch then
    return false
  end
  return is_alive(status) or lane[1] or number(lane[2]) > 0
end

if not is_live(epoch) then
  return { 'fenced' }
end
local newest = call('LINDEX', points, 0)
if not is_here() or newest == point then -- a repeated call: the answer was lost
  return { 'saved' }
end
if position > first_unfinished() then
  return { 'refused', { 'early', first_unfinished() } }
end
if newest and position < number(string.match(newest, '^%d+')) then
  return { 'refused', { 'passed', string.match(newest, '^%d+') } }
end
call('LPUSH', points, point)
release_points(model, 2)
call('LTRIM', points, 0, 1)
call('SADD', P .. 'pointed', model)
local older = call('LINDEX', points, 1)
if older then
  jobs.trim(model, string.match(older, '^%d+'))
end
return { 'saved' }
