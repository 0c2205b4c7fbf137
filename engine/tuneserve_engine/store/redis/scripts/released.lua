-- flags: no-writes
-- Returns the file ids that the store no longer names.
return call('SMEMBERS', P .. 'released')
