-- flags: no-writes
-- uses: records
-- The fields of a record.
return call('HGETALL', record_key(ARGV[2], ARGV[3]))
