-- flags: allow-oom
-- uses: records
if ARGV[2] == 'checkpoint' then
  records.delete_checkpoint(ARGV[3])
else
  records.delete(ARGV[2], ARGV[3])
end
