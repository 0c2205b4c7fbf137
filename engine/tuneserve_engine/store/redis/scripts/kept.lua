-- flags: no-writes
-- uses: records keeping
-- Returns what a tenant keeps, except the record of a key: {count, bytes, number being saved}.
local count, bytes, coming = kept(ARGV[2], ARGV[3], ARGV[4])
return { count, string.format('%.0f', bytes), coming }
