-- flags: allow-oom
-- uses: records placing jobs
-- Ends samples that still wait, if their session is still silent.
local before = number(ARGV[2])
for _, sample in ipairs(cmsgpack.unpack(ARGV[3])) do
  local seen = call('HGET', record_key('session', sample.session), 'last_seen_s')
  if seen and tonumber(seen) < before and is_unfinished(call('HGET', job_key(sample.id), 'state')) then
    jobs.drop(sample.id, sample)
  end
end
announce()
