-- Requests of a key that are still under way. Those that nobody renewed in time are not revived. Repeatable.
-- KEYS: bucket busy             ARGV: hold_ms id...
local t, hold = redis.call('TIME'), tonumber(ARGV[1])
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('ZREM', KEYS[2], '')  -- frees first: see scripts.py
for i = 2, #ARGV do
  if tonumber(redis.call('ZSCORE', KEYS[2], ARGV[i]) or 0) > now then redis.call('ZADD', KEYS[2], now + hold, ARGV[i]) end
end
redis.call('PEXPIRE', KEYS[1], 120000 + hold)
redis.call('PEXPIRE', KEYS[2], hold)
return 1
