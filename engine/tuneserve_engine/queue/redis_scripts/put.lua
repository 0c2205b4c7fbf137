-- uses: records
-- Inserts or replaces a record; with `new`, only inserts: what is there already, else nothing.
local record, new = cmsgpack.unpack(ARGV[2]), ARGV[3]
local stored = new == '1' and call('HGETALL', record_key(record.type, record.key)) or {}
if #stored == 0 then
  records.put(record.type, record.key, record.fields)
end
return stored
