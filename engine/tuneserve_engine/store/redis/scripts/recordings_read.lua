-- uses: records recordings
-- Returns the recordings of a tenant's samples: {1, body} each, or {0, reason} for a missing one.
-- Returns fewer than requested if the bodies are large. Reading counts as use.
local tenant, most = ARGV[2], number(ARGV[3])
local found, size = {}, 0
for i = 4, #ARGV, 2 do
  local id = recording_id(tenant, ARGV[i], ARGV[i + 1])
  local its = call('HMGET', recording_key(id), 'gone', 'size')
  if its[1] or not its[2] then
    found[#found + 1] = { 0, its[1] or 'unknown' }
  else
    size = size + number(its[2])
    if #found > 0 and size > most then
      break
    end
    recordings.use(id, tenant, NOW)
    found[#found + 1] = { 1, call('GET', recorded_key(id)) }
  end
end
return found
