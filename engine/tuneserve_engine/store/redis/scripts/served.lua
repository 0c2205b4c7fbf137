-- flags: no-writes
-- Returns every base model that a worker has ever leased with: {name, info, live workers, last sign
-- of life, {worker, its figures, ...}, live workers that only sample}.
local ttl = number(ARGV[2])
local count, samplers, told, found = {}, {}, {}, {}
for _, epoch in ipairs(call('ZRANGEBYSCORE', P .. 'workers', '-inf', '+inf')) do
  if number(call('ZSCORE', P .. 'workers', epoch)) >= tonumber(NOW) - ttl then
    local worker = call('HMGET', worker_key(epoch), 'base', 'name', 'figures', 'speed')
    local base, figures = worker[1], worker[3]
    count[base] = (count[base] or 0) + 1
    samplers[base] = (samplers[base] or 0) + (tonumber(worker[4] or '1') == 0 and 1 or 0)
    told[base] = told[base] or {}
    if figures then
      table.insert(told[base], worker[2])
      table.insert(told[base], figures)
    end
  end
end
local served = call('HGETALL', P .. 'served')
for i = 1, #served, 2 do
  local base = served[i]
  local seen = call('HGET', P .. 'served-seen', base)
  found[#found + 1] = {
    base, served[i + 1], count[base] or 0, seen, told[base] or {}, samplers[base] or 0,
  }
end
return found
