-- The checkpoints and unnamed saves that a tenant keeps or is about to keep.

-- Returns the number of checkpoints and unnamed saves, except the one of key `but`, their bytes,
-- and the number of them that are being saved. listed: the tenant as JSON text.
local function kept(tenant, listed, but)
  local count, bytes, coming = 0, 0, 0
  local function add(size)
    count, bytes = count + 1, bytes + number(size)
  end
  for _, key in ipairs(call('ZRANGE', P .. 'list:checkpoint:t' .. listed, 0, -1)) do
    local its = call('HMGET', record_key('checkpoint', key), 'size_bytes', 'expires_s')
    if key ~= but and (its[2] == 'null' or tonumber(its[2]) > tonumber(NOW)) then
      add(its[1])
    end
  end
  for _, key in ipairs(call('SMEMBERS', saves_key(tenant))) do
    if key ~= but then
      add(call('HGET', record_key('sampler', key), 'size_bytes'))
    end
  end
  for _, size in ipairs(call('HVALS', saving_key(tenant))) do
    add(size)
    coming = coming + 1
  end
  return count, bytes, coming
end
