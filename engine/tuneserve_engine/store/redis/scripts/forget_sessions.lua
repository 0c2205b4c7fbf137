-- flags: allow-oom
-- uses: records
-- Forgets ended sessions that were last seen before a time, with their models: about `most` records
-- at once. Returns how many.
local before, most = ARGV[2], number(ARGV[3])
local forgotten = 0
local due = call('ZRANGEBYSCORE', P .. 'ended-sessions', '-inf', '(' .. before, 'LIMIT', 0, most)
for _, key in ipairs(due) do
  local parent = call('HGET', record_key('session', key), 'key')
  for _, model in ipairs(records.under('model', parent)) do
    if forgotten >= most then
      return forgotten
    end
    if records.forget_model(model) then
      forgotten = forgotten + 1
    end
  end
  for _, type in ipairs({ 'sampler', 'custom_loss' }) do
    for _, owned in ipairs(records.under(type, parent)) do
      records.delete(type, owned)
    end
  end
  records.delete('session', key)
  forgotten = forgotten + 1
  if forgotten >= most then
    break
  end
end
return forgotten
