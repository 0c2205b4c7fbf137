-- flags: allow-oom
-- Publishes parts of running samples to the current listeners. Nothing is stored.
call('PUBLISH', P .. 'news', '2 ' .. ARGV[2])
return 'told'
