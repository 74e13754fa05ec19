-- A gateway lives. 1 = it was not on the list of the living, or about to be buried. Repeatable.
-- KEYS: gateways                ARGV: incarnation ttl_ms
local deadline = redis.call('ZSCORE', KEYS[1], ARGV[1])
local t = redis.call('TIME')
redis.call('ZREM', KEYS[1], '')  -- frees first: see scripts.py
redis.call('ZADD', KEYS[1], t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[2], ARGV[1])
if not deadline or tonumber(deadline) == 0 then return 1 end
return 0
