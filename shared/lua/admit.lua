-- A request enters: queued, epoch 1. Bounded: beyond max_queued nothing is written.
-- KEYS: req queued sched        ARGV: id body gateway max_queued admitted_msg
-- Repeatable: the second call answers `duplicate`.
if redis.call('EXISTS', KEYS[1]) == 1 then return 'duplicate' end
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[4]) then return 'full' end
local t = redis.call('TIME')
redis.call('HSET', KEYS[1], 'st', 'queued', 'ep', 1, 'gw', ARGV[3], 'tries', 0, 'body', ARGV[2])
redis.call('ZADD', KEYS[2], t[1] * 1000000 + t[2], ARGV[1])
redis.call('XADD', KEYS[3], '*', 'm', ARGV[5])
return 'admitted'
