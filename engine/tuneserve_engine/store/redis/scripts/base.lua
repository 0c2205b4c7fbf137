-- The functions that every script needs. KEYS[1] is the hash "meta". ARGV[1] is the time (empty for
-- the server's), a space, and the hash of the store's secret (empty while the caller does not know
-- it). A user's string in a key is the key's end, or stands behind its length, or is JSON text in
-- quotes: so no choice of strings makes two keys equal.
local call = redis.call
local META = KEYS[1]
local P = string.sub(META, 1, -5)
local NOW, STORE = string.match(ARGV[1], '^(%S*) ?(%S*)$')
-- Refuse a store that is not the caller's: it was wiped, or another server has its address.
if STORE ~= '' and redis.sha1hex(call('HGET', META, 'secret') or '') ~= STORE then
  return redis.error_reply('OTHERSTORE its secret is missing, or another')
end
if NOW == '' then
  local time = call('TIME')
  NOW = string.format('%s.%06d', time[1], time[2])
end

local function job_key(id) return P .. 'job:' .. id end
local function payload_key(id) return P .. 'payload:' .. id end
local function result_key(id) return P .. 'result:' .. id end
local function cost_key(id) return P .. 'cost:' .. id end
local function lane_key(model) return P .. 'lane:' .. model end
local function tenant_key(tenant) return P .. 'tenant:' .. tenant end
local function saving_key(tenant) return P .. 'saving:' .. tenant end
local function worker_key(epoch) return P .. 'worker:' .. epoch end
local function queue_key(epoch) return P .. 'queue:' .. epoch end
local function cancelled_key(epoch) return P .. 'cancelled:' .. epoch end
local function seqs_key(tenant, scope) return P .. 'seqs:' .. #tenant .. ':' .. tenant .. scope end

-- The jobs of a lane: released, by release; ahead of their turn (waiting or spent), by position;
-- done and kept for replay, by position.
local function ready_key(model) return P .. 'lane-ready:' .. model end
local function ahead_key(model) return P .. 'lane-ahead:' .. model end
local function log_key(model) return P .. 'lane-log:' .. model end
local function points_key(model) return P .. 'points:' .. model end

-- The number of points that a model's curve has had of each kind, with the newest of each; and the
-- points that are kept.
local function points_seen_key(model) return P .. 'curve-seen:' .. model end
local function curve_key(kind, model) return P .. 'curve:' .. kind .. ':' .. model end

-- The ended samples of one client of a sampling session, in the order in which they ended. A
-- client's sequence numbers begin with the client's number, before their last nine digits. They are
-- text, because some do not fit a double.
local function completions_key(client) return P .. 'completions:' .. client end
local function client_of(tenant, scope, seq)
  local number = string.sub(seq, 1, -10)
  return #tenant .. ':' .. tenant .. (number == '' and '0' or number) .. ':' .. scope
end

-- The message for waiting calls: whether jobs were placed or a lease ended, which jobs ended, and
-- the clients of the samples among these.
local news = { placed = false, ended = {}, completed = {} }

local function announce()
  if news.placed or #news.ended > 0 then
    local first, words = news.placed and '1' or '0', news.ended
    for client in pairs(news.completed) do
      words[#words + 1] = '+' .. redis.sha1hex(client)
    end
    call('PUBLISH', P .. 'news', first .. ' ' .. table.concat(words, ' '))
  end
end

local function is_live(epoch)
  return call('ZSCORE', P .. 'workers', epoch) ~= false
end

local function number(text) return tonumber(text or '0') end
