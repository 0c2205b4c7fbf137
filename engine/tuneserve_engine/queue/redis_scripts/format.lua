-- flags: no-writes
-- The store's format; nothing if it is to be made yet.
return call('HGET', META, 'format')
