-- flags: allow-oom
-- uses: placing
-- Ends a lease; no job counts an attempt.
if not is_live(ARGV[2]) then
  return { 'fenced' }
end
placing.place_waiting(placing.end_lease(ARGV[2]))
announce()
return { 'resigned' }
