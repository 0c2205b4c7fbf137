-- flags: no-writes
-- uses: placing jobs usage
-- Returns the sums of one tenant, or of all, from a day on and before another, day by day:
-- {tenant, {"what name", sum, ...}, ...} each.
local tenants = #ARGV > 3 and { ARGV[4] } or call('SMEMBERS', P .. 'tenants')
local found = {}
for _, tenant in ipairs(tenants) do
  local used = { tenant }
  for _, day in ipairs(call('ZRANGEBYSCORE', usage_days_key(tenant), ARGV[2], ARGV[3])) do
    used[#used + 1] = call('HGETALL', sums_key(day, tenant))
  end
  found[#found + 1] = used
end
return found
