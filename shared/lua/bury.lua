-- An overdue worker is declared dead; what it held comes back (to be requeued, then `forget`). Repeatable.
-- KEYS: workers worker held     ARGV: incarnation until_ms
-- Not overdue any more (it came back just now), or later than until_ms, by when it may have been kept from speaking:
-- nothing happens, and nil is the answer.
local deadline = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]))
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
if not deadline or deadline > now or (deadline > 0 and now > tonumber(ARGV[2])) then return false end
redis.call('ZREM', KEYS[1], '')  -- frees first: see scripts.py
redis.call('HSET', KEYS[2], 'state', 'dead')
redis.call('ZADD', KEYS[1], 0, ARGV[1])
return redis.call('HKEYS', KEYS[3])
