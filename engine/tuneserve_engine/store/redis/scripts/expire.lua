-- flags: allow-oom
-- uses: records placing jobs
-- Drops results of jobs that ended before a time, and expired checkpoints: a bounded number at
-- once. Returns how many.
local ended_before, now, most = ARGV[2], ARGV[3], ARGV[4]
local ids = call('ZRANGEBYSCORE', P .. 'ended', '-inf', '(' .. ended_before, 'LIMIT', 0, 1000)
for _, id in ipairs(ids) do
  jobs.expire(id)
end
local keys = call('ZRANGEBYSCORE', P .. 'expiring', '-inf', now, 'LIMIT', 0, most)
for _, key in ipairs(keys) do
  records.delete_checkpoint(key)
end
return #ids + #keys
