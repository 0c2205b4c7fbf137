-- flags: no-writes
-- Returns the state and usage of a job, without its result.
local id = ARGV[2]
local job = call('HMGET', job_key(id), 'tenant', 'kind', 'scope', 'state', 'category', 'created',
  'finished')
return { job[1], job[2], job[3], job[4], job[5], call('GET', cost_key(id)), job[6], job[7] }
