-- A queued request gets its workers: credit taken, fence set, tasks written, all or nothing.
-- KEYS: req queued leader worker_d held_d work_d worker_p held_p work_p
-- ARGV: id epoch attempt term decode credit decode_task prefill prefill_task   (prefill '-' = none)
-- Repeatable: the same attempt again answers `dispatched` and writes nothing.
if redis.call('HGET', KEYS[3], 'term') ~= ARGV[4] then return 'deposed' end
local r = redis.call('HMGET', KEYS[1], 'st', 'ep', 'at')
if r[2] == ARGV[2] and r[3] == ARGV[3] then return 'dispatched' end
if r[1] ~= 'queued' or r[2] ~= ARGV[2] then return 'stale' end
local w = redis.call('HMGET', KEYS[4], 'state', 'blocks', 'taken')
if w[1] ~= 'up' then return 'worker_gone' end
local with_prefill = ARGV[8] ~= '-'
if with_prefill and redis.call('HGET', KEYS[7], 'state') ~= 'up' then return 'worker_gone' end
if tonumber(w[3]) + tonumber(ARGV[6]) > tonumber(w[2]) then return 'no_credit' end
local held = ARGV[1] .. '/' .. ARGV[2]
redis.call('ZREM', KEYS[2], ARGV[1])  -- frees first: see scripts.py
redis.call('HINCRBY', KEYS[4], 'taken', ARGV[6])
redis.call('HSET', KEYS[5], held, ARGV[6])
redis.call('HSET', KEYS[1], 'st', 'dispatched', 'at', ARGV[3], 'term', ARGV[4], 'dw', ARGV[5], 'pw', ARGV[8], 'ho', '')
if with_prefill then
  redis.call('HSET', KEYS[8], held, 0)
  redis.call('XADD', KEYS[9], '*', 'm', ARGV[9])
end
redis.call('XADD', KEYS[6], '*', 'm', ARGV[7])
return 'dispatched'
