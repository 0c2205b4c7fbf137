-- flags: no-writes
-- uses: records
-- Returns the work of the sweep: {silent sessions (at most `most`), samples of silent sessions
-- {id, session}, lanes that waited too long for a gap {model, next, {{position, seq}, ...}}}.
local session_before, sample_before, gap_before = ARGV[2], number(ARGV[3]), ARGV[4]
local most = ARGV[5]

-- Returns the session of a tenant's sampler if the session is silent, otherwise false.
local function silent_session(tenant, sampler)
  local its = call('HMGET', record_key('sampler', sampler), 'parent', 'tenant')
  if not its[1] or unquote(its[2]) ~= tenant then
    return false
  end
  local session = unquote(its[1])
  local seen = call('HGET', record_key('session', session), 'last_seen_s')
  return seen and tonumber(seen) < sample_before and session
end

local function silent_samples()
  local found, is_silent = {}, {}
  for _, id in ipairs(call('ZRANGE', P .. 'samples', 0, -1)) do
    local job = call('HMGET', job_key(id), 'tenant', 'scope')
    local whose = #job[1] .. ':' .. job[1] .. job[2]
    if is_silent[whose] == nil then
      is_silent[whose] = silent_session(job[1], job[2])
    end
    if is_silent[whose] then
      found[#found + 1] = { id, is_silent[whose] }
    end
  end
  return found
end

local function gaps()
  local found, is_known = {}, {}
  for _, id in ipairs(call('ZRANGEBYSCORE', P .. 'held', '-inf', '(' .. gap_before)) do
    local model = call('HGET', job_key(id), 'model')
    if not is_known[model] and not call('HGET', lane_key(model), 'waits') then
      is_known[model] = true
      local ahead = {}
      local positions = call('ZRANGE', ahead_key(model), 0, -1, 'WITHSCORES')
      for i = 1, #positions, 2 do
        local seq = call('HGET', job_key(positions[i]), 'seq')
        ahead[#ahead + 1] = { positions[i + 1], seq }
      end
      found[#found + 1] = { model, call('HGET', lane_key(model), 'next') or '0', ahead }
    end
  end
  return found
end

local due = '(' .. session_before
local sessions = call('ZRANGEBYSCORE', P .. 'sessions', '-inf', due, 'LIMIT', 0, most)
return { sessions, silent_samples(), gaps() }
