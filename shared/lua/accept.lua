-- A worker takes the lease: prefill when it starts the prompt, decode when the blocks are verified.
-- KEYS: req leases held_p control_p
-- ARGV: id epoch attempt holder phase lease_ms cancel_msg control_ms
-- cancel_msg: decode computes the prompt itself, and prefill hears that its work is in vain; '' = it does not.
-- 1 = taken, 2 = decode has it already (the same attempt: prefill came late), 0 = stale. Repeatable.
local r = redis.call('HMGET', KEYS[1], 'st', 'ep', 'at')
if r[2] ~= ARGV[2] or r[3] ~= ARGV[3] then return 0 end
if r[1] ~= 'dispatched' and r[1] ~= 'prefill' and r[1] ~= 'decode' then return 0 end
if r[1] == 'decode' and ARGV[5] == 'prefill' then return 2 end
local t = redis.call('TIME')
redis.call('HDEL', KEYS[3], '')  -- frees first: see scripts.py
redis.call('HSET', KEYS[1], 'st', ARGV[5], 'ho', ARGV[4])
redis.call('ZADD', KEYS[2], t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[6], ARGV[1])
if ARGV[5] == 'decode' then redis.call('HDEL', KEYS[3], ARGV[1] .. '/' .. ARGV[2]) end
if ARGV[7] ~= '' then
  redis.call('XADD', KEYS[4], '*', 'm', ARGV[7])
  redis.call('PEXPIRE', KEYS[4], ARGV[8])
end
return 1
