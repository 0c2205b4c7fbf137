-- flags: no-writes
-- uses: records
-- Returns the fields of each of the tenant's samplers that has weights of its own.
local found = {}
for _, key in ipairs(call('SMEMBERS', saves_key(ARGV[2]))) do
  found[#found + 1] = call('HGETALL', record_key('sampler', key))
end
return found
