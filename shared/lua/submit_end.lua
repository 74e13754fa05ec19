-- The end of a submission: last entry of its result, acknowledgement and, if it failed for good, the dead letter.
-- KEYS: sub result submit dead [reply]
-- ARGV: owner group entry ttl_ms id status kind answer reason max_dead (name value)...   (reason '' = no dead letter)
-- 1 = ended, 0 = another gateway or entry has it. Repeatable: the second call writes nothing.
local s = redis.call('HMGET', KEYS[1], 'owner', 'state', 'total', 'seq', 'entry')
if s[1] ~= ARGV[1] or s[5] ~= ARGV[3] then return 0 end
if s[2] == 'done' then return 1 end
local item = {'status', ARGV[6], ARGV[7], ARGV[8]}
redis.call('XACK', KEYS[3], ARGV[2], ARGV[3])  -- frees first: see scripts.py
redis.call('XDEL', KEYS[3], ARGV[3])
redis.call('XADD', KEYS[2], s[3] .. '-' .. (s[4] + 1), unpack(item))
if KEYS[5] then
  redis.call('XADD', KEYS[5], '*', 'id', ARGV[5], unpack(item))
  redis.call('PEXPIRE', KEYS[5], ARGV[4])
end
if ARGV[9] ~= '' then
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[10], '*', 'reason', ARGV[9], 'entry', ARGV[3], unpack(ARGV, 11))
end
redis.call('HSET', KEYS[1], 'state', 'done')
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 1
