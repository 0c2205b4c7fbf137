-- The cost of each request, sums of it by tenant and day, and the points of curves.
local usage = {}

-- The days that have sums of a tenant, and the sums of one day, by "what name". The name is the
-- rest of the text, because it may have spaces.
local function usage_days_key(tenant) return P .. 'usage-days:' .. tenant end
local function sums_key(day, tenant) return P .. 'usage:' .. day .. ':' .. tenant end

-- Notes the usage of an ended job. Returns whether it was new: a worker reports it again if a
-- connection breaks. The usage is dropped with the result; the mark that it was counted stays as
-- long as the job.
function usage.note(id, text)
  local at = job_key(id)
  local state = call('HGET', at, 'state')
  if not state or is_unfinished(state) or call('HSETNX', at, 'counted', 1) == 0 then
    return false
  end
  if state == 'done' then
    call('SET', cost_key(id), text)
  end
  return true
end

-- Adds {what = sum, ...} to the sums of a tenant.
function usage.add(tenant, name, sums)
  call('SADD', P .. 'tenants', tenant)
  local day = string.format('%d', math.floor(tonumber(NOW) / 86400))
  call('ZADD', usage_days_key(tenant), day, day)
  for what, sum in pairs(sums) do
    call('HINCRBYFLOAT', sums_key(day, tenant), what .. ' ' .. name, string.format('%.17g', sum))
  end
end

-- Adds a point to a model's curve, which keeps those points whose number, among the points of their
-- kind, is a multiple of the stride, and the newest. The stride doubles when there would be more
-- than `most` points; then every second one is dropped.
function usage.draw(model, point, most)
  local seen, key = points_seen_key(model), curve_key(point.kind, model)
  local n = call('HINCRBY', seen, point.kind, 1) - 1
  local stride, limit = 1, most
  while n >= limit do
    stride, limit = stride * 2, limit * 2
  end
  local function drop_between(each)
    if tonumber(string.match(each, '^%d+')) % stride ~= 0 then
      call('ZREM', key, each)
    end
  end
  local newest = 'newest ' .. point.kind
  local before = call('HGET', seen, newest)
  if before then
    drop_between(before)
  end
  if n > 0 and n * 2 == limit then
    for _, each in ipairs(call('ZRANGE', key, 0, -1)) do
      drop_between(each)
    end
  end
  local member = n .. ' ' .. NOW .. ' ' .. point.text
  call('ZADD', key, point.position, member)
  call('HSET', seen, newest, member)
end
