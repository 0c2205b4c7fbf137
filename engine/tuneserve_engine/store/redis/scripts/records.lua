-- Records: each is a hash of field -> JSON text; sorted sets have their keys in order of insertion.
-- Only string fields are decoded here: numbers of 63 bits and empty lists stay unchanged.
local records = {}

local function record_key(type, key) return P .. 'record:' .. type .. ':' .. key end

local function is_alive(status) return status == '"creating"' or status == '"ready"' end

-- Returns the string of a JSON text.
local function unquote(text) return cjson.decode('[' .. text .. ']')[1] end

-- Tenant and parent are JSON text, so that quotes mark the end of each.
local function listings(type, tenant, parent)
  local start = P .. 'list:' .. type
  return { start, start .. ':t' .. tenant, start .. ':p' .. parent, start .. ':b' .. tenant .. parent }
end

local function open_sessions_key(tenant) return P .. 'open-sessions:' .. tenant end
local function saves_key(tenant) return P .. 'saves:' .. tenant end

-- Updates the sets that the sweep reads by time, and those that limits count.
local function watch(type, key)
  if type == 'session' then
    local found = call('HMGET', record_key(type, key), 'ended', 'last_seen_s', 'tenant')
    local is_open = found[1] == 'null'
    call('ZADD', P .. (is_open and 'sessions' or 'ended-sessions'), found[2], key)
    call('ZREM', P .. (is_open and 'ended-sessions' or 'sessions'), key)
    call(is_open and 'SADD' or 'SREM', open_sessions_key(unquote(found[3])), key)
  elseif type == 'checkpoint' then
    local expires = call('HGET', record_key(type, key), 'expires_s')
    if expires == 'null' then
      call('ZREM', P .. 'expiring', key)
    else
      call('ZADD', P .. 'expiring', expires, key)
    end
  elseif type == 'sampler' then
    local found = call('HMGET', record_key(type, key), 'file_id', 'model_path', 'tenant')
    local is_save = found[1] and found[1] ~= 'null' and (not found[2] or found[2] == 'null')
    call(is_save and 'SADD' or 'SREM', saves_key(unquote(found[3])), key)
  end
end

-- Notes a file that the store no longer names; it may be deleted at once: see SQLite's triggers.
local function release(file_id) call('SADD', P .. 'released', file_id) end

local function release_of_record(type, text)
  if (type == 'checkpoint' or type == 'sampler') and text and text ~= 'null' then
    release(unquote(text))
  end
end

-- Releases the files of a model's recovery points from the given one on; the newest is 0.
local function release_points(model, first)
  for _, point in ipairs(call('LRANGE', points_key(model), first, -1)) do
    release(cjson.decode(string.match(point, '{.*')).file_id)
  end
end

-- Sets fields ({name, JSON text, ...}); an existing record keeps its place in the listings.
function records.put(type, key, fields)
  local at = record_key(type, key)
  local before = call('HMGET', at, 'tenant', 'parent', 'file_id')
  call('HSET', at, unpack(fields))
  local now = call('HMGET', at, 'tenant', 'parent', 'file_id')
  if before[3] ~= now[3] then
    release_of_record(type, before[3])
  end
  if before[1] ~= now[1] or before[2] ~= now[2] then
    local n = before[1] and call('ZSCORE', P .. 'list:' .. type, key)
    if n then
      for _, listing in ipairs(listings(type, before[1], before[2])) do
        call('ZREM', listing, key)
      end
    else
      n = call('HINCRBY', META, 'records', 1)
    end
    for _, listing in ipairs(listings(type, now[1], now[2])) do
      call('ZADD', listing, n, key)
    end
  end
  watch(type, key)
end

-- Returns a JSON mapping of texts with some entries set and others removed.
local function with_entries(text, set, removed)
  local found = text and cjson.decode(text) or {}
  for name, each in pairs(set) do
    found[name] = each
  end
  for _, name in ipairs(removed) do
    found[name] = nil
  end
  return next(found) and cjson.encode(found) or '{}'
end

-- Sets fields of an existing record, and entries of fields that are mappings. A model that has
-- ended, failed or was lost keeps that status: its worker may report the creation after the session
-- is over.
function records.update(type, key, fields, entries)
  local status = call('HGET', record_key(type, key), type == 'model' and 'status' or 'key')
  if not status then
    return
  end
  local changes = {}
  for i = 1, #fields, 2 do
    if not (type == 'model' and fields[i] == 'status' and not is_alive(status)) then
      changes[#changes + 1] = fields[i]
      changes[#changes + 1] = fields[i + 1]
    end
  end
  for _, each in ipairs(entries) do
    local field, set, removed = unpack(each)
    changes[#changes + 1] = field
    changes[#changes + 1] = with_entries(call('HGET', record_key(type, key), field), set, removed)
  end
  if #changes > 0 then
    records.put(type, key, changes)
  end
end

function records.delete(type, key)
  local found = call('HMGET', record_key(type, key), 'tenant', 'parent', 'file_id')
  if found[1] then
    release_of_record(type, found[3])
    for _, listing in ipairs(listings(type, found[1], found[2])) do
      call('ZREM', listing, key)
    end
    call('DEL', record_key(type, key))
    if type == 'session' then
      call('ZREM', P .. 'sessions', key)
      call('ZREM', P .. 'ended-sessions', key)
      call('SREM', open_sessions_key(unquote(found[1])), key)
    elseif type == 'checkpoint' then
      call('ZREM', P .. 'expiring', key)
    elseif type == 'sampler' then
      call('SREM', saves_key(unquote(found[1])), key)
    end
  end
end

-- Returns the keys of the records under a parent (JSON text), newest first: all, or at most `most`.
function records.under(type, parent, most)
  return call('ZREVRANGE', P .. 'list:' .. type .. ':p' .. parent, 0, (most or 0) - 1)
end

-- Makes the sets of `watch` for records of earlier releases, which had fewer sets.
function records.watch_all()
  local watched = number(call('HGET', META, 'watched'))
  local sessions = call('ZCARD', P .. 'sessions') + call('ZCARD', P .. 'ended-sessions')
  if watched < 1 or sessions ~= call('ZCARD', P .. 'list:session') then
    for _, key in ipairs(call('ZRANGE', P .. 'list:session', 0, -1)) do
      watch('session', key)
    end
  end
  if watched < 2 then
    for _, key in ipairs(call('ZRANGE', P .. 'list:sampler', 0, -1)) do
      watch('sampler', key)
    end
  end
  call('HSET', META, 'watched', 2)
end

-- Forgets a model, with its lane and curves, if it is dead, unloaded and without checkpoints.
-- Returns whether it was.
function records.forget_model(model)
  local its = call('HMGET', record_key('model', model), 'status', 'key')
  if not its[1] or is_alive(its[1]) then
    return false
  end
  local lane = call('HMGET', lane_key(model), 'worker', 'jobs', 'tenant')
  if lane[1] or number(lane[2]) > 0 or call('ZCARD', P .. 'list:checkpoint:p' .. its[2]) > 0 then
    return false
  end
  if lane[3] then
    call('SREM', P .. 'active:' .. lane[3], model)
  end
  for _, kind in ipairs(call('HKEYS', points_seen_key(model))) do
    call('DEL', curve_key(kind, model))
  end
  call('DEL', lane_key(model), points_key(model), points_seen_key(model))
  call('SREM', P .. 'pointed', model)
  for _, event in ipairs(records.under('run_event', its[2])) do
    records.delete('run_event', event)
  end
  records.delete('model', model)
  return true
end

-- Does the same, if the model's session is forgotten.
function records.forget_orphan(model)
  local parent = call('HGET', record_key('model', model), 'parent')
  if parent and call('EXISTS', record_key('session', unquote(parent))) == 0 then
    records.forget_model(model)
  end
end

-- Deletes a checkpoint. The last checkpoint of a forgotten session's model takes the model along.
function records.delete_checkpoint(key)
  local parent = call('HGET', record_key('checkpoint', key), 'parent')
  records.delete('checkpoint', key)
  if parent then
    records.forget_orphan(unquote(parent))
  end
end
