-- flags: allow-oom
-- uses: records placing jobs
-- Drops the results of those of the jobs that are ended samples of a client, and their completions.
local of_client = completions_key(ARGV[2])
for i = 3, #ARGV do
  local id = ARGV[i]
  if call('ZREM', of_client, id) == 1 and call('HGET', job_key(id), 'state') == 'done' then
    jobs.expire(id)
  end
end
