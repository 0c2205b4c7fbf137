-- flags: allow-oom
-- uses: placing
-- Ends a lease without a death.
if not is_live(ARGV[2]) then
  return { 'fenced' }
end
placing.place_waiting(placing.end_lease(ARGV[2]))
announce()
return { 'resigned' }
