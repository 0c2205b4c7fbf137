-- flags: allow-oom
-- uses: placing
-- Ends a lease; no job counts an attempt.
if not is_live(ARGV[2]) then
  return { 'fenced' }
end
local orphans = {}
placing.end_lease(ARGV[2], orphans)
placing.place_orphans(orphans)
announce()
return { 'resigned' }
