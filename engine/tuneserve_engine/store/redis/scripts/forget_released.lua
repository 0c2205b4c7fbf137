-- flags: allow-oom
-- Forgets released file ids whose files are deleted.
for i = 2, #ARGV do
  call('SREM', P .. 'released', ARGV[i])
end
