-- flags: no-writes
-- Returns how jobs ended: for each id {state, error's category, content type, error or body, usage,
-- time created, time ended}, or nothing if it is unknown. Returns fewer than requested if the
-- bodies are large.
local MOST = 16 * 1024 * 1024
local found, size = {}, 0
for i = 2, #ARGV do
  local id = ARGV[i]
  local job = call('HMGET', job_key(id), 'state', 'category', 'ctype', 'created', 'finished')
  if not job[1] then
    found[#found + 1] = {}
  else
    local result = job[1] == 'done' and call('GET', result_key(id))
    found[#found + 1] = { job[1], job[2], job[3], result, call('GET', cost_key(id)), job[4], job[5] }
    size = size + #(result or '')
    if size > MOST then
      break
    end
  end
end
return found
