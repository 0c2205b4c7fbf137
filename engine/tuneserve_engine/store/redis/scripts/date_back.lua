-- flags: allow-oom
-- uses: records recordings placing
-- Moves times of the future back by `by` seconds, or to now if that is not enough; `most` of each
-- kind at once. Returns how many were moved.
local now, by, most = number(ARGV[2]), number(ARGV[3]), ARGV[4]
local done = 0

-- Returns a time that is not after now, even after rounding.
local function dated(at)
  done = done + 1
  return string.format('%.6f', (math.floor(math.min(tonumber(at) - by, now) * 1e6) - 1) / 1e6)
end

local function of_future(set)
  return call('ZRANGEBYSCORE', set, '(' .. ARGV[2], '+inf', 'LIMIT', 0, most)
end

for _, set in ipairs({ 'sessions', 'ended-sessions' }) do
  for _, key in ipairs(of_future(P .. set)) do
    local seen = call('HGET', record_key('session', key), 'last_seen_s')
    records.put('session', key, { 'last_seen_s', dated(seen) })
  end
end
for _, id in ipairs(of_future(P .. 'held')) do
  call('ZADD', P .. 'held', dated(call('ZSCORE', P .. 'held', id)), id)
end
for _, id in ipairs(of_future(KEPT)) do
  recordings.use(id, call('HGET', recording_key(id), 'tenant'), dated(call('ZSCORE', KEPT, id)))
end
for _, epoch in ipairs(call('ZRANGE', P .. 'workers', 0, -1)) do
  for _, model in ipairs(call('SMEMBERS', lanes_key(epoch))) do
    local requested = call('HGET', lane_key(model), 'requested')
    if number(requested) > now then
      call('HSET', lane_key(model), 'requested', dated(requested))
    end
  end
end
return done
