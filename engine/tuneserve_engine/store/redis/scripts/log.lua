-- flags: no-writes
-- Returns the done jobs of a model that are kept for replay, in order from a position on.
local epoch, model, start, most_bytes = ARGV[2], ARGV[3], ARGV[4], number(ARGV[5])
if not is_live(epoch) then
  return { 'fenced' }
end
local found, size = {}, 0
for _, id in ipairs(call('ZRANGEBYSCORE', log_key(model), start, '+inf')) do
  local job = call('HMGET', job_key(id), 'size', unpack(cmsgpack.unpack(ARGV[6])))
  size = size + number(job[1])
  if #found > 0 and size > most_bytes then
    break
  end
  job[1] = id
  job[#job + 1] = call('GET', payload_key(id))
  found[#found + 1] = job
end
return { 'log', found }
