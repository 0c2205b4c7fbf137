-- Recordings of samples, for training that refers to them: a hash for each, with its body in a key
-- of its own. The hash of a dropped recording stays for a while, and says why it was dropped.
local recordings = {}

local KEPT, GONE, BYTES = P .. 'recordings', P .. 'recordings-gone', P .. 'recorded-bytes'
local function recording_key(id) return P .. 'recording:' .. id end
local function recorded_key(id) return P .. 'recorded:' .. id end
local function recordings_of_key(tenant) return P .. 'recordings-of:' .. tenant end
local function recordings_in_key(session) return P .. 'recordings-in:' .. session end
local function recording_id(tenant, scope, seq)
  return #tenant .. ':' .. tenant .. scope .. ':' .. seq
end

-- Notes when a recording was last used: the sweep begins with the least recently used ones.
function recordings.use(id, tenant, at)
  call('ZADD', KEPT, at, id)
  call('ZADD', recordings_of_key(tenant), at, id)
end

-- Drops a recording's body. Returns its size, 0 if there was none.
function recordings.drop(id, why)
  local used = call('ZSCORE', KEPT, id)
  if not used then
    return 0
  end
  local its = call('HMGET', recording_key(id), 'tenant', 'session', 'size')
  call('DEL', recorded_key(id))
  call('ZREM', KEPT, id)
  call('ZREM', recordings_of_key(its[1]), id)
  call('SREM', recordings_in_key(its[2]), id)
  call('HINCRBY', BYTES, its[1], 0 - number(its[3]))
  call('HSET', recording_key(id), 'gone', why)
  call('ZADD', GONE, used, id)
  return number(its[3])
end

-- Stores a sample's recording, unless its session has ended and its sampler is gone. The recording
-- counts `beside` bytes more than its body.
function recordings.put(job, body, beside)
  local its = call('HMGET', job_key(job), 'tenant', 'scope', 'seq')
  local sampler = call('HMGET', record_key('sampler', its[2]), 'tenant', 'parent')
  if not sampler[1] or unquote(sampler[1]) ~= its[1] then
    return
  end
  local size = #body + beside
  local id, session = recording_id(its[1], its[2], its[3]), unquote(sampler[2])
  recordings.drop(id, 'unused') -- an earlier one, whose request was forgotten
  call('ZREM', GONE, id)
  call('HDEL', recording_key(id), 'gone')
  call('HSET', recording_key(id), 'tenant', its[1], 'session', session, 'size', size)
  call('SET', recorded_key(id), body)
  call('SADD', recordings_in_key(session), id)
  call('HINCRBY', BYTES, its[1], size)
  recordings.use(id, its[1], NOW)
end

-- Marks up to `most` recordings of a session to be dropped first. Returns how many.
function recordings.end_session(session, most)
  local ids = call('SPOP', recordings_in_key(session), most)
  for _, id in ipairs(ids) do
    recordings.use(id, call('HGET', recording_key(id), 'tenant'), 0)
  end
  return #ids
end
