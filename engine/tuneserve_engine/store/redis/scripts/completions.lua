-- flags: no-writes
-- Returns the ended samples of a client, in their order: for each {id, number, 1 if it failed,
-- bytes of its result or nothing}.
local of_client, from, most = completions_key(ARGV[2]), '(' .. ARGV[3], ARGV[4]
local found = {}
local ids = call('ZRANGEBYSCORE', of_client, from, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
for i = 1, #ids, 2 do
  local job = call('HMGET', job_key(ids[i]), 'state', 'category')
  local is_there = job[1] == 'done'
  local failed = is_there and job[2] ~= false
  local size = is_there and not failed and call('STRLEN', result_key(ids[i]))
  found[#found + 1] = { ids[i], ids[i + 1], failed and 1 or 0, size }
end
return found
