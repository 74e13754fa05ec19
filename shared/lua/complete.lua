-- The end, from the worker that holds it: Finished out, lease gone, credit back, one script.
-- KEYS: req leases tokens sched log worker_d held_d held_p open
-- ARGV: id epoch attempt finished_msg ended_msg keep_ms
-- Repeatable: the second call answers 0 and writes nothing.
local r = redis.call('HMGET', KEYS[1], 'st', 'ep', 'at')
if r[2] ~= ARGV[2] or r[3] ~= ARGV[3] then return 0 end
if r[1] ~= 'dispatched' and r[1] ~= 'prefill' and r[1] ~= 'decode' then return 0 end
local held = ARGV[1] .. '/' .. ARGV[2]
redis.call('ZREM', KEYS[2], ARGV[1])  -- frees first: see scripts.py
redis.call('XADD', KEYS[3], '*', 'm', ARGV[4])
redis.call('SREM', KEYS[9], ARGV[1])
local credit = redis.call('HGET', KEYS[7], held)
if credit then redis.call('HINCRBY', KEYS[6], 'taken', 0 - credit) end
redis.call('HDEL', KEYS[7], held)
redis.call('HDEL', KEYS[8], held)
redis.call('HSET', KEYS[1], 'st', 'done', 'fin', ARGV[4])
redis.call('HDEL', KEYS[1], 'body')
redis.call('PEXPIRE', KEYS[1], ARGV[6])
for c = 0, (redis.call('HGET', KEYS[1], 'nc') or 1) - 1 do
  redis.call('PEXPIRE', string.sub(KEYS[5], 1, -2) .. c, ARGV[6])
end
redis.call('XADD', KEYS[4], '*', 'm', ARGV[5])
return 1
