-- Progress: the holder's leases live on. Several requests in one call.
-- KEYS: leases req...           ARGV: holder lease_ms (id epoch attempt)...
-- Per request: 1 = renewed, 2 = handed on (same attempt, other holder), 0 = stale. Repeatable.
local t = redis.call('TIME')
local deadline = t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[2]
local out = {}
redis.call('ZREM', KEYS[1], '')  -- frees first: see scripts.py
for i = 2, #KEYS do
  local a = 3 * (i - 2) + 2
  local r = redis.call('HMGET', KEYS[i], 'ep', 'at', 'ho', 'st')
  if r[1] ~= ARGV[a + 2] or r[2] ~= ARGV[a + 3] or (r[4] ~= 'prefill' and r[4] ~= 'decode') then
    out[i - 1] = 0
  elseif r[3] ~= ARGV[1] then
    out[i - 1] = 2
  else
    redis.call('ZADD', KEYS[1], deadline, ARGV[a + 1])
    out[i - 1] = 1
  end
end
return out
