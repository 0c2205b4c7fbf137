-- flags: allow-oom
-- uses: records placing jobs
-- Ends an unfinished sample with an error: {'unknown'}, {'other'} for a job of another kind, or
-- {'sample'}.
local id = ARGV[2]
local job = call('HMGET', job_key(id), 'kind', 'state')
if not job[1] then
  return { 'unknown' }
end
if job[1] ~= 'sample' then
  return { 'other' }
end
if is_unfinished(job[2]) then
  jobs.drop(id, { error = ARGV[3], category = ARGV[4] })
end
announce()
return { 'sample' }
