-- Decode credit comes back: a part of it (prefix hits), or all (the work was dropped).
-- KEYS: worker_d held_d sched   ARGV: held_field keep freed_msg   (keep: blocks that stay taken; '' = the work is over)
-- Repeatable: what is given is the new value, not a difference.
local credit = redis.call('HGET', KEYS[2], ARGV[1])
if not credit then return 0 end
local back = tonumber(credit) - tonumber(ARGV[2] ~= '' and ARGV[2] or 0)
if back <= 0 and ARGV[2] ~= '' then return 0 end
redis.call('HDEL', KEYS[2], '')  -- frees first: see scripts.py
if ARGV[2] == '' then redis.call('HDEL', KEYS[2], ARGV[1]) else redis.call('HSET', KEYS[2], ARGV[1], ARGV[2]) end
redis.call('HINCRBY', KEYS[1], 'taken', 0 - back)
redis.call('XADD', KEYS[3], '*', 'm', ARGV[3])
return back
