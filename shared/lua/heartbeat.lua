-- Still alive. 0 = unknown or buried: the worker must start a new life.
-- KEYS: workers worker          ARGV: incarnation ttl_ms
local state = redis.call('HGET', KEYS[2], 'state')
if not state or state == 'dead' then return 0 end
local t = redis.call('TIME')
redis.call('ZREM', KEYS[1], '')  -- frees first: see scripts.py
redis.call('ZADD', KEYS[1], t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[2], ARGV[1])
return 1
