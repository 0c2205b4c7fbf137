-- uses: records
-- Inserts a record, unless its key exists: {'created'}, {'stored', fields of the stored one ...},
-- or a limit: {'sessions', of all, of the tenant}, {'samplers', of the session, of the tenant},
-- {'fast', seconds passed}.
-- limits: of sessions and samplers; rate: records that the tenant may create within a minute.
local record, limits, rate = cmsgpack.unpack(ARGV[2]), cmsgpack.unpack(ARGV[3]), number(ARGV[4])

local stored = call('HGETALL', record_key(record.type, record.key))
if #stored > 0 then
  return { 'stored', stored }
end
if record.type == 'session' then
  local of_all, own = call('ZCARD', P .. 'sessions'), call('SCARD', open_sessions_key(record.tenant))
  if of_all >= limits.server_sessions or own >= limits.tenant_sessions then
    return { 'sessions', of_all, own }
  end
end
if record.type == 'sampler' then
  local list = P .. 'list:sampler:'
  local under = call('ZCARD', list .. 'p' .. record.under)
  local own = call('ZCARD', list .. 't' .. record.listed)
  if under >= limits.session_samplers or own >= limits.tenant_samplers then
    return { 'samplers', under, own }
  end
end
if rate > 0 then
  local list = P .. 'list:' .. record.type .. ':t' .. record.listed
  local earlier = call('ZREVRANGE', list, rate - 1, rate - 1)[1]
  local created = earlier and call('HGET', record_key(record.type, earlier), 'created_s')
  local passed = created and tonumber(NOW) - tonumber(created) or 60
  if passed >= 0 and passed < 60 then
    return { 'fast', string.format('%.3f', math.floor(passed * 1000) / 1000) }
  end
end
records.put(record.type, record.key, record.fields)
return { 'created' }
