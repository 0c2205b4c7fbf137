-- flags: no-writes
-- uses: records
-- Returns file ids of jobs, file ids of records (JSON text), and recovery points.
local of_records, points = {}, {}
for _, type in ipairs({ 'checkpoint', 'sampler' }) do
  for _, key in ipairs(call('ZRANGE', P .. 'list:' .. type, 0, -1)) do
    of_records[#of_records + 1] = call('HGET', record_key(type, key), 'file_id')
  end
end
for _, model in ipairs(call('SMEMBERS', P .. 'pointed')) do
  for _, point in ipairs(call('LRANGE', points_key(model), 0, -1)) do
    points[#points + 1] = point
  end
end
return { call('HVALS', P .. 'files'), of_records, points }
