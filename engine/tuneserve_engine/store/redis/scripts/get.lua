-- flags: no-writes
-- uses: records
-- Returns the fields of a record.
return call('HGETALL', record_key(ARGV[2], ARGV[3]))
