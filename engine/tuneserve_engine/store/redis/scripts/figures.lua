-- flags: no-writes
-- Returns the store's fill level: {{tenant, unfinished jobs, ...}, jobs kept for replay, points,
-- models with unfinished jobs}.
local unfinished, logged, points, busy = {}, 0, 0, {}
for _, tenant in ipairs(call('SMEMBERS', P .. 'tenants')) do
  local jobs = number(call('HGET', tenant_key(tenant), 'jobs'))
  if jobs > 0 then
    unfinished[#unfinished + 1] = tenant
    unfinished[#unfinished + 1] = jobs
    for _, model in ipairs(call('SMEMBERS', P .. 'active:' .. tenant)) do
      if number(call('HGET', lane_key(model), 'jobs')) > 0 then
        busy[#busy + 1] = model
      end
    end
  end
end
for _, model in ipairs(call('SMEMBERS', P .. 'logged')) do
  logged = logged + call('ZCARD', log_key(model))
end
for _, model in ipairs(call('SMEMBERS', P .. 'pointed')) do
  points = points + call('LLEN', points_key(model))
end
return { unfinished, logged, points, busy }
