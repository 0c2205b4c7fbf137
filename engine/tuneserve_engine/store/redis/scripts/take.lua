-- flags: no-writes
-- Returns unfinished jobs placed with a worker, in order, behind a release number; {'fenced'} if
-- the lease is over.
local epoch, after, most_jobs, most_bytes = ARGV[2], ARGV[3], ARGV[4], number(ARGV[5])
if not is_live(epoch) then
  return { 'fenced' }
end
local taken, size = {}, 0
for _, id in ipairs(call('ZRANGEBYSCORE', queue_key(epoch), '(' .. after, '+inf', 'LIMIT', 0, most_jobs)) do
  local job = call('HMGET', job_key(id), 'size', unpack(cmsgpack.unpack(ARGV[6])))
  size = size + number(job[1])
  if #taken > 0 and size > most_bytes then
    break
  end
  job[1] = id
  job[#job + 1] = call('GET', payload_key(id))
  taken[#taken + 1] = job
end
return { 'taken', taken }
