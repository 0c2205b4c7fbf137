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
local orphans = {}
for _, other in ipairs(call('ZRANGE', P .. 'workers', 0, -1)) do
  if number(call('ZSCORE', P .. 'workers', other)) < tonumber(NOW) - policy.ttl then
    leases.died(other, orphans, policy)
  end
end
placing.place_orphans(orphans)

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
-- A worker gives up what it has above its part of all models, which is in proportion to its speed,
-- idle models first, as long as another worker would get them. The parts add up to all models. A
-- model that is no whole part goes to the worker with the most above its own, so that it need not
-- move.
local trainers, speeds, sum = placing.trainers(call('HGET', worker_key(epoch), 'base')), 0, 0
for _, its in ipairs(trainers) do
  speeds, sum = speeds + its[2], sum + its[3]
end
local above, order_of, whole = {}, {}, 0
for i, its in ipairs(trainers) do
  above[i] = its[3] - math.floor(sum * its[2] / speeds)
  order_of[i], whole = i, whole + above[i]
end
table.sort(order_of, function(a, b)
  if above[a] ~= above[b] then
    return above[a] > above[b]
  end
  return a < b
end)
local surplus, own = 0, nil
for rank, i in ipairs(order_of) do
  if trainers[i][1] == epoch then
    surplus, own = above[i] - (rank <= whole and 1 or 0), i
  end
end
for given = 0, surplus - 1 do
  local best, least
  for i, its in ipairs(trainers) do
    local at = (1 + its[3]) / its[2]
    if i ~= own and (not best or at < least) then
      best, least = its, at
    end
  end
  if not best or least >= (trainers[own][3] - given) / trainers[own][2] then
    surplus = given -- this worker would be chosen again
    break
  end
  best[3] = best[3] + 1
end
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
