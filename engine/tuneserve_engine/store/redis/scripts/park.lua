-- flags: allow-oom
-- uses: placing
-- Marks idle models to be released: no job is unfinished, and the last request was before a time.
local before = number(ARGV[2])
for _, epoch in ipairs(call('ZRANGE', P .. 'workers', 0, -1)) do
  for _, model in ipairs(call('SMEMBERS', lanes_key(epoch))) do
    local lane = call('HMGET', lane_key(model), 'jobs', 'requested')
    if number(lane[1]) == 0 and number(lane[2]) < before then
      call('HSET', lane_key(model), 'park', 1)
    end
  end
end
