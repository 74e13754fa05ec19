-- An overdue gateway admits nothing more; its open requests come back (to be cancelled, then `forget_gateway`).
-- KEYS: gateways open           ARGV: incarnation until_ms
-- Not overdue any more, or later than until_ms: nothing happens, and nil is the answer. Repeatable.
local deadline = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]))
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
if not deadline or deadline > now or (deadline > 0 and now > tonumber(ARGV[2])) then return false end
redis.call('ZREM', KEYS[1], '')  -- frees first: see scripts.py
redis.call('ZADD', KEYS[1], 0, ARGV[1])
return redis.call('SMEMBERS', KEYS[2])
