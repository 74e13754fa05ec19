-- After Redis' clock was set back: no deadline may lie further ahead than a renewal now would put it, or who died just
-- before would count as living for as long as the clock went back.
-- KEYS: deadlines               ARGV: ttl_ms
-- How many were pulled in. Repeatable.
local t, count = redis.call('TIME'), 0
local latest = t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[1]
redis.call('ZREM', KEYS[1], '')  -- frees first: see scripts.py
for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '+inf')) do
  if tonumber(redis.call('ZSCORE', KEYS[1], name)) > latest then
    redis.call('ZADD', KEYS[1], latest, name)
    count = count + 1
  end
end
return count
