-- flags: allow-oom
-- uses: records placing jobs
-- Forgets jobs that ended before a time, at most `most` at once. Returns how many.
local ended_before, most = ARGV[2], ARGV[3]
local ids = call('ZRANGEBYSCORE', P .. 'expired', '-inf', '(' .. ended_before, 'LIMIT', 0, most)
for _, id in ipairs(ids) do
  jobs.forget(id)
end
return #ids
