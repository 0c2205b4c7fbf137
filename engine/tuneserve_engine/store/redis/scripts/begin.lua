-- flags: allow-oom
-- Notes the jobs that a worker runs from now on: they count an attempt if the worker dies.
local epoch = ARGV[2]
if not is_live(epoch) then
  return { 'fenced' }
end
if #ARGV > 2 then
  call('SET', P .. 'running:' .. epoch, table.concat(ARGV, ' ', 3))
else
  call('DEL', P .. 'running:' .. epoch)
end
return { 'noted' }
