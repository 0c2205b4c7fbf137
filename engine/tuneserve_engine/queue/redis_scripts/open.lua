-- flags: allow-oom
-- The store's format and secret; both are made with the store.
if call('EXISTS', META) == 0 then
  call('HSET', META, 'format', ARGV[2], 'secret', ARGV[3])
end
return call('HMGET', META, 'format', 'secret')
