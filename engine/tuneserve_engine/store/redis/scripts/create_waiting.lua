-- flags: allow-oom
-- uses: records placing jobs rooms
-- Releases the waiting new models that there is room for.
local most = number(ARGV[2])
local full = {}
for _, id in ipairs(call('ZRANGE', P .. 'creating', 0, -1)) do
  local job = call('HMGET', job_key(id), 'tenant', 'model', 'position')
  local tenant, model = job[1], job[2]
  local own = call('HGET', record_key('tenant', tenant), 'max_models')
  local to_park = not full[tenant]
    and rooms.to_park(tenant, own and own ~= 'null' and tonumber(own) or most)
  if to_park then
    rooms.park(to_park)
    jobs.no_longer_waits(id, model)
    jobs.advance(model, number(job[3]))
  else
    full[tenant] = true
  end
end
announce()
