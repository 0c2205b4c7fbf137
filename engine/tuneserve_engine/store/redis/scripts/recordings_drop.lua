-- flags: allow-oom
-- uses: records recordings
-- Drops recordings that were not used since a time. For tenants with more than `limit` bytes, drops
-- the least recently used ones, but never the only one. Forgets recordings that were dropped long
-- ago. Handles a bounded number at once, and returns how many.
local before, forget_before, limit = ARGV[2], ARGV[3], number(ARGV[4])
local most, most_bytes = number(ARGV[5]), number(ARGV[6])
local done = 0

local function drop(ids, why, bytes)
  for _, id in ipairs(ids) do
    if bytes <= 0 then
      break
    end
    bytes = bytes - recordings.drop(id, why)
    done = done + 1
  end
end

drop(call('ZRANGEBYSCORE', KEPT, '-inf', '(' .. before, 'LIMIT', 0, most), 'unused', most_bytes)
local totals = call('HGETALL', BYTES)
for i = 1, #totals, 2 do
  local tenant, over = totals[i], number(totals[i + 1]) - limit
  if over > 0 then
    local last = math.min(call('ZCARD', recordings_of_key(tenant)) - 1, most)
    local oldest = last > 0 and call('ZRANGE', recordings_of_key(tenant), 0, last - 1) or {}
    drop(oldest, 'no room', math.min(over, most_bytes))
  end
end
for _, id in ipairs(call('ZRANGEBYSCORE', GONE, '-inf', '(' .. forget_before, 'LIMIT', 0, most)) do
  call('DEL', recording_key(id))
  call('ZREM', GONE, id)
  done = done + 1
end
return done
