-- A submission's owner goes on with a request that was admitted before, by itself or by a gateway that is gone:
-- the next epoch, events to the owner's stream from the token log on; or, where it has ended, its end once more.
-- KEYS: sub req queued leases tokens sched log control_p control_d held_p open open_before
-- ARGV: owner id epoch prefill decode gateway body admitted_msg cancel_msg nonce control_ms entry   (epoch.. as last read)
-- 'unknown' = never admitted, or forgotten; 'moved' = look again; 'lost' = another's, gateway or entry. Repeatable by nonce.
local s = redis.call('HMGET', KEYS[1], 'owner', 'state', 'entry')
if s[1] ~= ARGV[1] or s[2] ~= 'open' or s[3] ~= ARGV[12] then return 'lost' end
local r = redis.call('HMGET', KEYS[2], 'st', 'ep', 'pw', 'dw', 'fin', 'nonce', 'gw')
if not r[1] then return 'unknown' end
if r[6] == ARGV[10] then return 'adopted' end
redis.call('HDEL', KEYS[2], '')  -- frees first: see scripts.py
if r[1] == 'done' then
  redis.call('HSET', KEYS[2], 'gw', ARGV[1], 'nonce', ARGV[10])
  redis.call('XADD', KEYS[5], '*', 'm', r[5])
  return 'adopted'
end
if r[2] ~= ARGV[3] or (r[3] or '') ~= ARGV[4] or (r[4] or '') ~= ARGV[5] or r[7] ~= ARGV[6] then return 'moved' end
if r[1] == 'dispatched' or r[1] == 'prefill' or r[1] == 'decode' then
  redis.call('ZREM', KEYS[4], ARGV[2])
  redis.call('HDEL', KEYS[10], ARGV[2] .. '/' .. ARGV[3])
  if ARGV[4] ~= '-' then redis.call('XADD', KEYS[8], '*', 'm', ARGV[9]) end
  redis.call('XADD', KEYS[9], '*', 'm', ARGV[9])
  redis.call('PEXPIRE', KEYS[8], ARGV[11])
  redis.call('PEXPIRE', KEYS[9], ARGV[11])
end
local epoch, t = tonumber(ARGV[3]) + 1, redis.call('TIME')
redis.call('HSET', KEYS[2], 'st', 'queued', 'ep', epoch, 'gw', ARGV[1], 'body', ARGV[7], 'nonce', ARGV[10], 'at', '',
  'ho', '', 'pw', '', 'dw', '')
redis.call('SREM', KEYS[12], ARGV[2])
redis.call('SADD', KEYS[11], ARGV[2])
redis.call('PERSIST', KEYS[2])
redis.call('PERSIST', KEYS[7])
local marker = {'e', ARGV[2], epoch, redis.call('STRLEN', KEYS[7]) / 4}
local others = (redis.call('HGET', KEYS[2], 'nc') or 1) - 1
if others > 0 then marker[5] = {} end
for c = 1, others do
  local log = string.sub(KEYS[7], 1, -2) .. c
  redis.call('PERSIST', log)
  marker[5][c] = redis.call('STRLEN', log) / 4
end
redis.call('XADD', KEYS[5], '*', 'm', cmsgpack.pack(marker))
redis.call('ZADD', KEYS[3], t[1] * 1000000 + t[2], ARGV[2])
redis.call('XADD', KEYS[6], '*', 'm', ARGV[8])
return 'adopted'
