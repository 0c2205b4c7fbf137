-- uses: records
-- Inserts or replaces a record.
local record = cmsgpack.unpack(ARGV[2])
records.put(record.type, record.key, record.fields)
