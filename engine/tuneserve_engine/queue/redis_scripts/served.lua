-- flags: no-writes
-- Every base model that was ever leased with: {name, facts, workers heard of of late, last time}.
local ttl = number(ARGV[2])
local count, found = {}, {}
for _, epoch in ipairs(call('ZRANGEBYSCORE', P .. 'workers', '-inf', '+inf')) do
  if number(call('ZSCORE', P .. 'workers', epoch)) >= tonumber(NOW) - ttl then
    local base = call('HGET', worker_key(epoch), 'base')
    count[base] = (count[base] or 0) + 1
  end
end
local served = call('HGETALL', P .. 'served')
for i = 1, #served, 2 do
  local base = served[i]
  local seen = call('HGET', P .. 'served-seen', base)
  found[#found + 1] = { base, served[i + 1], count[base] or 0, seen }
end
return found
