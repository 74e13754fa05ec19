-- A lost request goes on: token log read, epoch raised, marker to the gateway, back in the queue; or it fails for good.
-- KEYS: req queued leases tokens sched log control_p control_d held_p open
-- ARGV: id epoch prefill decode lost max_tries admitted_msg cancel_msg finished_msg ended_msg keep_ms control_ms until_ms
-- lost: the holder that died or gives the request up (prefill only while decode has not accepted); '' = its lease ran out
-- until_ms: a lease that ran out is not taken later than that, as its holder may have been kept from renewing.
-- The old decode worker gives its credit back itself when it drops the work; a dead one's credit died with it.
local r = redis.call('HMGET', KEYS[1], 'st', 'ep', 'pw', 'dw', 'ho', 'tries')
if r[1] ~= 'dispatched' and r[1] ~= 'prefill' and r[1] ~= 'decode' then return 'stale' end
if r[2] ~= ARGV[2] or r[3] ~= ARGV[3] or r[4] ~= ARGV[4] then return 'stale' end
local t = redis.call('TIME')
if ARGV[5] == '' then
  local deadline = redis.call('ZSCORE', KEYS[3], ARGV[1])
  local now = t[1] * 1000 + math.floor(t[2] / 1000)
  if not deadline or tonumber(deadline) > now or now > tonumber(ARGV[13]) then return 'stale' end
elseif ARGV[5] ~= r[4] and (r[1] == 'decode' or ARGV[5] ~= r[3]) then
  return 'stale'
end
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('HDEL', KEYS[9], ARGV[1] .. '/' .. ARGV[2])
if r[3] ~= '-' then redis.call('XADD', KEYS[7], '*', 'm', ARGV[8]) end
redis.call('XADD', KEYS[8], '*', 'm', ARGV[8])
redis.call('PEXPIRE', KEYS[7], ARGV[12])
redis.call('PEXPIRE', KEYS[8], ARGV[12])
local epoch = tonumber(ARGV[2]) + 1
if tonumber(r[6]) + 1 >= tonumber(ARGV[6]) then
  redis.call('XADD', KEYS[4], '*', 'm', ARGV[9])
  redis.call('XADD', KEYS[5], '*', 'm', ARGV[10])
  redis.call('SREM', KEYS[10], ARGV[1])
  redis.call('HSET', KEYS[1], 'st', 'done', 'fin', ARGV[9])
  redis.call('HDEL', KEYS[1], 'body')
  redis.call('PEXPIRE', KEYS[1], ARGV[11])
  for c = 0, (redis.call('HGET', KEYS[1], 'nc') or 1) - 1 do
    redis.call('PEXPIRE', string.sub(KEYS[6], 1, -2) .. c, ARGV[11])
  end
  return 'failed'
end
redis.call('HSET', KEYS[1], 'st', 'queued', 'ep', epoch, 'at', '', 'ho', '', 'pw', '', 'dw', '', 'tries', r[6] + 1)
local marker = {'e', ARGV[1], epoch, redis.call('STRLEN', KEYS[6]) / 4}
local others = (redis.call('HGET', KEYS[1], 'nc') or 1) - 1
if others > 0 then marker[5] = {} end
for c = 1, others do marker[5][c] = redis.call('STRLEN', string.sub(KEYS[6], 1, -2) .. c) / 4 end
redis.call('XADD', KEYS[4], '*', 'm', cmsgpack.pack(marker))
redis.call('ZADD', KEYS[2], t[1] * 1000000 + t[2], ARGV[1])
redis.call('XADD', KEYS[5], '*', 'm', ARGV[7])
return 'requeued'
