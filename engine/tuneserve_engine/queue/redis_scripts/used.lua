-- flags: no-writes
-- uses: placing jobs usage
-- The sums of a tenant, or with none of all: {tenant, {"day what name", sum, ...}} each.
local tenants = #ARGV > 1 and { ARGV[2] } or call('SMEMBERS', P .. 'tenants')
local found = {}
for _, tenant in ipairs(tenants) do
  found[#found + 1] = { tenant, call('HGETALL', sums_key(tenant)) }
end
return found
