-- flags: allow-oom
-- uses: records placing jobs leases
-- Extends a lease, and ends the leases that have run out: {'renewed', {models to be released,
-- samples cancelled since the last renewal, {tenant, weight, ...} of tenants with their own}}.
local epoch = ARGV[2]
local policy = cmsgpack.unpack(ARGV[3])
local figures = ARGV[4]

if not is_live(epoch) then
  return { 'fenced' }
end
leases.forgive(policy.ttl)
leases.see(epoch)
if figures ~= '' then
  call('HSET', worker_key(epoch), 'figures', figures)
end
local orphaned = {}
for _, other in ipairs(call('ZRANGE', P .. 'workers', 0, -1)) do
  if number(call('ZSCORE', P .. 'workers', other)) < tonumber(NOW) - policy.ttl then
    orphaned[leases.died(other, policy)] = true
  end
end
for base in pairs(orphaned) do
  placing.place_waiting(base)
end

local models, order, parked = call('SMEMBERS', lanes_key(epoch)), {}, 0
for _, model in ipairs(models) do
  local lane = call('HMGET', lane_key(model), 'park', 'jobs')
  order[model] = lane[1] and 0 or 1
  parked = parked + 1 - order[model]
  order[model] = 2 * order[model] + (number(lane[2]) > 0 and 1 or 0)
end
table.sort(models, function(a, b)
  if order[a] ~= order[b] then
    return order[a] < order[b]
  end
  return a < b
end)
-- A worker that has room for more, with as many models for its speed, gets as many as would even the
-- two out, or as this one has above its part of all, whichever is fewer: all workers hand over at
-- once. Idle models go first.
local trainers = placing.trainers(call('HGET', worker_key(epoch), 'base'))
local own, mine, speeds, sum, evened = #models, nil, 0, 0, 0
for _, its in ipairs(trainers) do
  mine = its[1] == epoch and its[2] or mine
  speeds, sum = speeds + its[2], sum + its[3]
end
if mine then
  for _, its in ipairs(trainers) do
    evened = math.max(evened, math.floor((own * its[2] - its[3] * mine) / (mine + its[2])))
  end
end
local surplus = mine and math.min(evened, own - math.floor(sum * mine / speeds)) or 0
local given_up = {}
for i = 1, math.max(parked, surplus) do
  given_up[i] = models[i]
end
local cancelled = call('LRANGE', cancelled_key(epoch), 0, -1)
call('DEL', cancelled_key(epoch))
local weights = {}
for _, tenant in ipairs(call('ZRANGE', P .. 'list:tenant', 0, -1)) do
  local weight = call('HGET', record_key('tenant', tenant), 'weight')
  if weight and weight ~= 'null' then
    weights[#weights + 1] = tenant
    weights[#weights + 1] = weight
  end
end
announce()
return { 'renewed', { given_up, cancelled, weights } }
