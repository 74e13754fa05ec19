-- The client is gone or has enough: no further work, and every holder is told in the same script.
-- KEYS: req queued leases tokens sched log control_p control_d open held_p
-- ARGV: id epoch prefill decode cancel_msg finished_msg ended_msg keep_ms control_ms   (prefill, decode as last read; '' = none)
-- `moved` = holders changed since the caller looked: look again. Credit stays taken until decode has dropped the work.
local r = redis.call('HMGET', KEYS[1], 'st', 'ep', 'pw', 'dw')
if not r[1] or r[1] == 'done' or r[1] == 'cancelled' then return 'gone' end
if r[2] ~= ARGV[2] or (r[3] or '') ~= ARGV[3] or (r[4] or '') ~= ARGV[4] then return 'moved' end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('SREM', KEYS[9], ARGV[1])
redis.call('XADD', KEYS[4], '*', 'm', ARGV[6])
redis.call('XADD', KEYS[5], '*', 'm', ARGV[7])
if r[1] ~= 'queued' then
  if ARGV[3] ~= '-' then redis.call('XADD', KEYS[7], '*', 'm', ARGV[5]) end
  redis.call('HDEL', KEYS[10], ARGV[1] .. '/' .. ARGV[2])
  redis.call('XADD', KEYS[8], '*', 'm', ARGV[5])
  redis.call('PEXPIRE', KEYS[7], ARGV[9])
  redis.call('PEXPIRE', KEYS[8], ARGV[9])
end
redis.call('HSET', KEYS[1], 'st', 'cancelled')
redis.call('HDEL', KEYS[1], 'body')
redis.call('PEXPIRE', KEYS[1], ARGV[8])
for c = 0, (redis.call('HGET', KEYS[1], 'nc') or 1) - 1 do
  redis.call('PEXPIRE', string.sub(KEYS[6], 1, -2) .. c, ARGV[8])
end
return 'cancelled'
