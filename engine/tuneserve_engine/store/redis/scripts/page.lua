-- flags: no-writes
-- uses: records
-- Returns records of a listing, newest first: {total, {fields, ...}}.
local type, offset, limit = ARGV[2], number(ARGV[4]), number(ARGV[5])
local listing = P .. 'list:' .. type .. ARGV[3]
local last = limit < 0 and -1 or offset + limit - 1
local found = {}
if limit ~= 0 then
  for _, key in ipairs(call('ZREVRANGE', listing, offset, last)) do
    found[#found + 1] = call('HGETALL', record_key(type, key))
  end
end
return { call('ZCARD', listing), found }
