-- flags: allow-oom
-- uses: records placing jobs
-- Ends a sample that has not ended, with an error: {'unknown'}, {'other'} for a job of another kind,
-- {'sample'}.
local id = ARGV[2]
local job = call('HMGET', job_key(id), 'kind', 'state', 'worker')
if not job[1] then
  return { 'unknown' }
end
if job[1] ~= 'sample' then
  return { 'other' }
end
if is_unfinished(job[2]) then
  jobs.finish(id, { error = ARGV[3], category = ARGV[4] })
  if job[3] ~= '' then
    call('RPUSH', cancelled_key(job[3]), id)
  end
end
announce()
return { 'sample' }
