-- flags: no-writes
-- Returns the recovery points of a model, newest first.
if not is_live(ARGV[2]) then
  return { 'fenced' }
end
return { 'points', call('LRANGE', points_key(ARGV[3]), 0, -1) }
