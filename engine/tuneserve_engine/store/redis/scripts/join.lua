-- uses: records
-- Adds a client to a sampling session. Returns its number, or nothing for an unknown session.
local at = record_key('sampler', ARGV[2])
if call('EXISTS', at) == 0 then
  return false
end
return call('HINCRBY', at, 'clients', 1)
