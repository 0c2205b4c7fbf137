-- flags: allow-oom
-- uses: records
-- Returns the store's format and secret; a new store gets both here.
if call('EXISTS', META) == 0 then
  call('HSET', META, 'format', ARGV[2], 'secret', ARGV[3])
end
local found = call('HMGET', META, 'format', 'secret')
if found[1] == ARGV[2] then
  records.watch_all()
end
return found
