-- Decode credit comes back: a part of it (prefix hits), or all (the work was dropped).
-- KEYS: worker_d held_d sched   ARGV: held_field blocks freed_msg   (blocks '' = all)
-- Part of it: never below 0. All: repeatable, the second call finds nothing and gives nothing back.
local credit = redis.call('HGET', KEYS[2], ARGV[1])
if not credit then return 0 end
local back = tonumber(credit)
if ARGV[2] ~= '' then back = math.min(back, tonumber(ARGV[2])) end
if ARGV[2] == '' then redis.call('HDEL', KEYS[2], ARGV[1]) else redis.call('HINCRBY', KEYS[2], ARGV[1], -back) end
redis.call('HINCRBY', KEYS[1], 'taken', -back)
redis.call('XADD', KEYS[3], '*', 'm', ARGV[3])
return back
