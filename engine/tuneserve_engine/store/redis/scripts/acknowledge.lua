-- flags: allow-oom
-- uses: records placing jobs
-- Drops the results and completions of the jobs that are ended samples of a client.
local of_client = completions_key(ARGV[2])
for i = 3, #ARGV do
  local id = ARGV[i]
  if call('ZREM', of_client, id) == 1 and call('HGET', job_key(id), 'state') == 'done' then
    jobs.expire(id)
  end
end
