-- flags: allow-oom
-- uses: records placing jobs leases
-- Ends the lease of a worker that was killed from outside, by its name.
local name, policy = ARGV[2], cmsgpack.unpack(ARGV[3])

local epoch = call('HGET', P .. 'names', name)
if epoch and is_live(epoch) then
  local orphans = {}
  leases.died(epoch, orphans, policy, true)
  placing.place_orphans(orphans)
  announce()
end
return { 'ended' }
