-- A worker leaves: `draining` takes nothing new; `dead` is fenced at once, and the reaper finds it first.
-- KEYS: workers worker sched    ARGV: incarnation state draining_msg
local state = redis.call('HGET', KEYS[2], 'state')
if not state or state == 'dead' then return 0 end
redis.call('ZREM', KEYS[1], '')  -- frees first: see scripts.py
redis.call('HSET', KEYS[2], 'state', ARGV[2])
if ARGV[2] == 'dead' then redis.call('ZADD', KEYS[1], 0, ARGV[1]) end
redis.call('XADD', KEYS[3], '*', 'm', ARGV[3])
return 1
