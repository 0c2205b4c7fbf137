-- uses: records
-- One more client of a sampling session: its number, or nothing if there is no such session.
local at = record_key('sampler', ARGV[2])
if call('EXISTS', at) == 0 then
  return false
end
return call('HINCRBY', at, 'clients', 1)
