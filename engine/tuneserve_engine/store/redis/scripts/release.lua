-- flags: allow-oom
-- uses: placing
-- Gives up a worker's model.
local epoch, model = ARGV[2], ARGV[3]
if not is_live(epoch) then
  return { 'fenced' }
end
if call('HGET', lane_key(model), 'worker') == epoch then
  local lane = call('HMGET', lane_key(model), 'park', 'jobs')
  placing.release(model)
  if not lane[1] and number(lane[2]) == 0 then -- it counts for its next worker from now on
    placing.place_idle(model)
  end
  announce()
end
return { 'released' }
