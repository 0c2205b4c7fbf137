-- flags: no-writes
-- uses: placing jobs usage
-- Returns the points of a model's curve behind a position, of the requested kinds.
local found = {}
for i = 4, #ARGV do
  for _, each in ipairs(call('ZRANGEBYSCORE', curve_key(ARGV[i], ARGV[2]), '(' .. ARGV[3], '+inf')) do
    found[#found + 1] = each
  end
end
return found
