-- The last of a dead worker: after all that it held was requeued.
-- KEYS: workers worker held work control   ARGV: incarnation
if redis.call('HGET', KEYS[2], 'state') ~= 'dead' then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4], KEYS[5])
return 1
