-- A worker joins, with all its credit free. An incarnation registers once; again is a repeat and changes nothing.
-- KEYS: workers worker sched    ARGV: incarnation registration num_blocks ttl_ms joined_msg
local t = redis.call('TIME')
redis.call('ZREM', KEYS[1], '')  -- frees first: see scripts.py
redis.call('ZADD', KEYS[1], t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[4], ARGV[1])
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('HSET', KEYS[2], 'reg', ARGV[2], 'state', 'up', 'blocks', ARGV[3], 'taken', 0)
redis.call('XADD', KEYS[3], '*', 'm', ARGV[5])
return 1
