-- flags: allow-oom
-- uses: records placing jobs leases
-- Makes a process the worker of a name: {epoch, whether it was already}.
local name, owner, base, info = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local policy = cmsgpack.unpack(ARGV[6])

call('HSET', P .. 'served', base, info)
local earlier = call('HGET', P .. 'names', name)
if earlier and call('HGET', worker_key(earlier), 'owner') == owner then
  leases.hear(earlier, policy.ttl)
  return { tonumber(earlier), 1 }
end
local orphaned = earlier and leases.died(earlier, policy)
local epoch = tostring(call('HINCRBY', META, 'epochs', 1))
call('HSET', worker_key(epoch), 'name', name, 'owner', owner, 'base', base)
call('HSET', P .. 'names', name, epoch)
leases.hear(epoch, policy.ttl)
placing.place_waiting(base)
if orphaned and orphaned ~= base then
  placing.place_waiting(orphaned)
end
announce()
return { tonumber(epoch), 0 }
