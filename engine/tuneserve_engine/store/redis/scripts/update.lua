-- flags: allow-oom
-- uses: records
-- Sets fields of existing records.
for _, update in ipairs(cmsgpack.unpack(ARGV[2])) do
  records.update(update.type, update.key, update.fields, update.entries)
end
