-- flags: allow-oom
-- uses: records placing jobs leases
-- Keeps a lease, and ends those that ran out: {'renewed', models to be given up}.
local epoch = ARGV[2]
local policy = cmsgpack.unpack(ARGV[3])

if not is_live(epoch) then
  return { 'fenced' }
end
leases.hear(epoch, policy.ttl)
local orphaned = {}
for _, other in ipairs(call('ZRANGE', P .. 'workers', 0, -1)) do
  if number(call('ZSCORE', P .. 'workers', other)) < tonumber(NOW) - policy.ttl then
    orphaned[leases.died(other, policy)] = true
  end
end
for base in pairs(orphaned) do
  placing.place_waiting(base)
end

local mine, parked, others, idle = call('SMEMBERS', lanes_key(epoch)), {}, {}, {}
for _, model in ipairs(mine) do
  local lane = call('HMGET', lane_key(model), 'park', 'jobs')
  if lane[1] then
    parked[#parked + 1] = model
  else
    others[#others + 1] = model
    idle[model] = number(lane[2]) == 0
  end
end
-- Another worker with at least two models fewer gets half the difference, idle ones first.
local _, lowest = placing.least(call('HGET', worker_key(epoch), 'base'), lanes_of)
local surplus = math.floor((#mine - lowest) / 2)
table.sort(others, function(a, b)
  if idle[a] ~= idle[b] then
    return idle[a]
  end
  return a < b
end)
for i = 1, surplus - #parked do
  parked[#parked + 1] = others[i]
end
announce()
return { 'renewed', parked }
