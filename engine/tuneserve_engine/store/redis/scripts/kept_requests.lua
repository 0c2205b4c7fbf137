-- flags: no-writes
-- Returns the kind, state, category, usage and times of jobs, in the order of their ids.
local found = {}
for i = 2, #ARGV do
  local job = call('HMGET', job_key(ARGV[i]), 'kind', 'state', 'category', 'created', 'finished')
  found[#found + 1] = { job[1], job[2], job[3], call('GET', cost_key(ARGV[i])), job[4], job[5] }
end
return found
