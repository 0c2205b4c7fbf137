-- The limit on a tenant's models in use.
local rooms = {}

-- Counts the tenant's models in use: not ended, not parked or about to be, and not waiting for
-- room. Also returns the idle ones among them, the longest idle first.
local function in_use(tenant)
  local count, idle = 0, {}
  for _, model in ipairs(call('SMEMBERS', P .. 'active:' .. tenant)) do
    local status = call('HGET', record_key('model', model), 'status')
    local lane = call('HMGET', lane_key(model), 'park', 'jobs', 'requested', 'waits')
    if status and is_alive(status) and not lane[1] and not lane[4] then
      count = count + 1
      if number(lane[2]) == 0 then
        idle[#idle + 1] = { model, number(lane[3]) }
      end
    end
  end
  table.sort(idle, function(a, b)
    return a[2] < b[2] or a[2] == b[2] and a[1] < b[1]
  end)
  return count, idle
end

-- Returns the models to park so that there is room for one more; nil if too few are idle.
function rooms.to_park(tenant, limit)
  local count, idle = in_use(tenant)
  local found = {}
  for n = 1, count - limit + 1 do
    if not idle[n] then
      return nil
    end
    found[n] = idle[n][1]
  end
  return found
end

function rooms.park(models)
  for _, model in ipairs(models) do
    call('HSET', lane_key(model), 'park', 1)
  end
end

-- Returns how many models of the tenant wait to be created.
function rooms.waiting(tenant)
  local count = 0
  for _, id in ipairs(call('ZRANGE', P .. 'creating', 0, -1)) do
    if call('HGET', job_key(id), 'tenant') == tenant then
      count = count + 1
    end
  end
  return count
end
