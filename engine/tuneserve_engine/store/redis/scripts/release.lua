-- flags: allow-oom
-- uses: placing
-- Gives up a worker's model.
local epoch, model = ARGV[2], ARGV[3]
if not is_live(epoch) then
  return { 'fenced' }
end
if call('HGET', lane_key(model), 'worker') == epoch then
  placing.release(model)
  announce()
end
return { 'released' }
