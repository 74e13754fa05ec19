-- What a key may still use: two token buckets that refill with Redis TIME, and who is under way.
-- KEYS: bucket busy  ARGV: op requests_per_minute tokens_per_minute max_concurrent hold_ms tokens id
-- enter: a request begins. charge: it may cost so many tokens in all. A limit of 0 is none. Answer: granted, what is
-- short, ms until it may be there (-1: never), requests left, tokens left, ms until each bucket is full.
-- Repeatable: what a request was charged is kept under its id until it leaves, and only the difference is taken.
local op, hold, cost, id = ARGV[1], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local max = {r = tonumber(ARGV[2]), t = tonumber(ARGV[3]), c = tonumber(ARGV[4])}
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do -- its gateway died: no refund
  redis.call('ZREM', KEYS[2], gone)
  redis.call('HDEL', KEYS[1], 'c:' .. gone)
end
local saved = redis.call('HMGET', KEYS[1], 'r', 't', 'at')
local since, left = math.max(0, now - (tonumber(saved[3]) or now)), {} -- 0 where the clock was set back
for i, name in ipairs({'r', 't'}) do
  left[name] = math.min(max[name], (tonumber(saved[i]) or max[name]) + since * max[name] / 60000)
end
local ok, short, wait = 1, '', 0
local function need(name, amount)
  if ok == 0 or max[name] == 0 or left[name] >= amount then return end
  ok, short, wait = 0, name, amount > max[name] and -1 or math.ceil((amount - left[name]) * 60000 / max[name])
end
if op == 'enter' and not redis.call('ZSCORE', KEYS[2], id) then
  need('r', 1)
  need('t', math.min(1, max.t))
  if ok == 1 and max.c > 0 and redis.call('ZCARD', KEYS[2]) >= max.c then ok, short, wait = 0, 'c', 1000 end
  if ok == 1 then
    left.r = math.max(0, left.r - 1)
    redis.call('ZADD', KEYS[2], now + hold, id)
  end
elseif op == 'charge' then
  local more = cost - (tonumber(redis.call('HGET', KEYS[1], 'c:' .. id)) or 0)
  need('t', more)
  if ok == 1 then
    left.t = math.max(0, left.t - more)
    redis.call('HSET', KEYS[1], 'c:' .. id, cost)
    redis.call('ZADD', KEYS[2], now + hold, id)
  end
end
redis.call('HSET', KEYS[1], 'r', tostring(left.r), 't', tostring(left.t), 'at', now)
redis.call('PEXPIRE', KEYS[1], 120000 + hold)
redis.call('PEXPIRE', KEYS[2], hold)
local function full(name) return max[name] == 0 and 0 or math.ceil((max[name] - left[name]) * 60000 / max[name]) end
return {ok, short, wait, math.max(0, math.floor(left.r)), math.max(0, math.floor(left.t)), full('r'), full('t')}
