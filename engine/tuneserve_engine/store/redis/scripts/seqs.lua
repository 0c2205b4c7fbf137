-- flags: no-writes
-- Returns a part of the requests of a scope, and the cursor of the next part, which is 0 at the end:
-- {cursor, {seq, id, ...}}.
local tenant, scope, cursor = ARGV[2], ARGV[3], ARGV[4]
return call('HSCAN', seqs_key(tenant, scope), cursor, 'COUNT', 2000)
