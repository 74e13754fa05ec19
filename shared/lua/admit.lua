-- A request enters the queue. From the client: epoch 1, bounded by max_queued. Again, because Redis lost it: the epoch
-- and the tokens that its gateway knows.
-- KEYS: req queued sched gateways open log tokens
-- ARGV: id body gateway max_queued admitted_msg epoch packed_log...   (one log for each choice; '' = none yet)
-- The log's key ends with its choice: those of the others lie beside it. A higher epoch is told to the gateway.
-- `unknown`: the gateway is not on the list of the living (any more). Repeatable: the second call answers `duplicate`.
if redis.call('EXISTS', KEYS[1]) == 1 then return 'duplicate' end
local deadline = redis.call('ZSCORE', KEYS[4], ARGV[3])
if not deadline or tonumber(deadline) == 0 then return 'unknown' end
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[4]) then return 'full' end
local t = redis.call('TIME')
redis.call('HSET', KEYS[1], 'st', 'queued', 'ep', ARGV[6], 'gw', ARGV[3], 'tries', 0, 'body', ARGV[2])
redis.call('SADD', KEYS[5], ARGV[1])
if #ARGV > 7 then redis.call('HSET', KEYS[1], 'nc', #ARGV - 6) end
for i = 7, #ARGV do
  if ARGV[i] ~= '' then redis.call('SET', string.sub(KEYS[6], 1, -2) .. (i - 7), ARGV[i]) end
end
if tonumber(ARGV[6]) > 1 then
  local marker = {'e', ARGV[1], tonumber(ARGV[6]), #ARGV[7] / 4}
  if #ARGV > 7 then marker[5] = {} end
  for i = 8, #ARGV do marker[5][i - 7] = #ARGV[i] / 4 end
  redis.call('XADD', KEYS[7], '*', 'm', cmsgpack.pack(marker))
end
redis.call('ZADD', KEYS[2], t[1] * 1000000 + t[2], ARGV[1])
redis.call('XADD', KEYS[3], '*', 'm', ARGV[5])
return 'admitted'
