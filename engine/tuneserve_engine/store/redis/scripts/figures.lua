-- flags: no-writes
-- Returns the store's fill level: {{tenant, unfinished jobs, ...}, jobs kept for replay, points}.
local unfinished, logged, points = {}, 0, 0
for _, tenant in ipairs(call('SMEMBERS', P .. 'tenants')) do
  local jobs = number(call('HGET', tenant_key(tenant), 'jobs'))
  if jobs > 0 then
    unfinished[#unfinished + 1] = tenant
    unfinished[#unfinished + 1] = jobs
  end
end
for _, model in ipairs(call('SMEMBERS', P .. 'logged')) do
  logged = logged + call('ZCARD', log_key(model))
end
for _, model in ipairs(call('SMEMBERS', P .. 'pointed')) do
  points = points + call('LLEN', points_key(model))
end
return { unfinished, logged, points }
