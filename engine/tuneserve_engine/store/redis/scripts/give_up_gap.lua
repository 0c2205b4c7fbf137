-- flags: allow-oom
-- uses: records placing jobs
-- Ends all held jobs of a lane, if the lane is unchanged since the caller read it: no optimizer
-- step may run without the data before it.
local model, following, count = ARGV[2], ARGV[3], number(ARGV[4])
local ahead = ahead_key(model)
if (call('HGET', lane_key(model), 'next') or '0') ~= following or call('ZCARD', ahead) ~= count then
  return 0
end
local highest = tonumber(following) - 1
for _, id in ipairs(call('ZRANGE', ahead, 0, -1)) do
  local job = call('HMGET', job_key(id), 'state', 'position')
  if job[1] == 'held' then
    jobs.finish(id, { error = ARGV[5], category = ARGV[6] })
    highest = tonumber(job[2])
  end
end
jobs.advance(model, highest + 1)
announce()
return 1
