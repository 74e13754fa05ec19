-- A scheduler takes over: the term grows, and dispatches of older terms are refused.
-- KEYS: leader                  ARGV: incarnation
redis.call('HDEL', KEYS[1], '')  -- frees first: see scripts.py
redis.call('HSET', KEYS[1], 'incarnation', ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'term', 1)
