-- flags: allow-oom
-- uses: records
records.delete(ARGV[2], ARGV[3])
