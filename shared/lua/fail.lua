-- A queued request that no worker can ever serve ends with an error.
-- KEYS: req queued tokens sched log open   ARGV: id epoch finished_msg ended_msg keep_ms
local r = redis.call('HMGET', KEYS[1], 'st', 'ep')
if r[1] ~= 'queued' or r[2] ~= ARGV[2] then return 0 end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('SREM', KEYS[6], ARGV[1])
redis.call('XADD', KEYS[3], '*', 'm', ARGV[3])
redis.call('XADD', KEYS[4], '*', 'm', ARGV[4])
redis.call('HSET', KEYS[1], 'st', 'done', 'fin', ARGV[3])
redis.call('HDEL', KEYS[1], 'body')
redis.call('PEXPIRE', KEYS[1], ARGV[5])
for c = 0, (redis.call('HGET', KEYS[1], 'nc') or 1) - 1 do
  redis.call('PEXPIRE', string.sub(KEYS[5], 1, -2) .. c, ARGV[5])
end
return 1
