-- flags: no-writes
-- Returns the tenant and the scope of a job.
return call('HMGET', job_key(ARGV[2]), 'tenant', 'scope')
