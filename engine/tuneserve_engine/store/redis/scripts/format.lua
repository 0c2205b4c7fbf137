-- flags: no-writes
-- Returns the store's format; empty for the remains of a wiped store, nothing for a new store.
return call('HGET', META, 'format') or call('EXISTS', META) == 1 and ''
