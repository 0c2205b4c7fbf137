-- flags: allow-oom
-- uses: records placing jobs leases
-- Makes a process the worker of a name: {epoch, whether it was already}. If the store knows the
-- base model by another revision, returns {'other', that revision}.
local name, owner, base, info = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local policy, revision, speed = cmsgpack.unpack(ARGV[6]), ARGV[7], ARGV[8]

local known = call('HGET', P .. 'served-revision', base)
if revision ~= '' then
  if known and known ~= revision then
    return { 'other', known }
  end
  call('HSET', P .. 'served-revision', base, revision)
end
leases.forgive(policy.ttl)
-- What a model may ask for is up to the workers that train.
call(tonumber(speed) == 0 and 'HSETNX' or 'HSET', P .. 'served', base, info)
call('HSET', P .. 'served-seen', base, NOW)
local earlier = call('HGET', P .. 'names', name)
if earlier and call('HGET', worker_key(earlier), 'owner') == owner then
  leases.see(earlier)
  return { tonumber(earlier), 1 }
end
local orphans = { [base] = {} }
if earlier then
  leases.died(earlier, orphans, policy)
end
local epoch = tostring(call('HINCRBY', META, 'epochs', 1))
call('HSET', worker_key(epoch), 'name', name, 'owner', owner, 'base', base, 'speed', speed)
call('HSET', P .. 'names', name, epoch)
leases.see(epoch)
placing.place_orphans(orphans)
announce()
return { tonumber(epoch), 0 }
