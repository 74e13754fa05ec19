-- A gateway takes a submission. The first entry with an id is the work; a later one is a repeat and acknowledged at once.
-- KEYS: sub submit [reply]      ARGV: owner group entry id result_key ttl_ms nonce
-- {'open', redis_ms, fields of sub} | {'repeat'} | {'done'} (it has ended, but was not acknowledged). Repeatable: by the
-- nonce, an attempt whose answer was lost counts once.
-- 'gone': Redis has lost the entry. Its client submits again; work that nobody could take over would swallow that.
local r = redis.call('HMGET', KEYS[1], 'entry', 'state', 'reply')
if r[1] and (r[1] ~= ARGV[3] or r[2] == 'done') then
  local fresh = redis.call('XACK', KEYS[2], ARGV[2], ARGV[3])
  redis.call('XDEL', KEYS[2], ARGV[3])
  if r[1] == ARGV[3] then return {'done'} end
  if fresh == 1 and KEYS[3] and KEYS[3] ~= r[3] then
    redis.call('XADD', KEYS[3], '*', 'id', ARGV[4], 'duplicate', ARGV[5])
    redis.call('PEXPIRE', KEYS[3], ARGV[6])
  end
  return {'repeat'}
end
if not r[1] then
  if #redis.call('XRANGE', KEYS[2], ARGV[3], ARGV[3]) == 0 then return {'gone'} end
  redis.call('HSET', KEYS[1], 'entry', ARGV[3], 'state', 'open', 'reply', KEYS[3] or '', 'total', 0, 'seq', 0, 'tries', 0)
end
redis.call('HSET', KEYS[1], 'owner', ARGV[1])
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[7] then
  redis.call('HSET', KEYS[1], 'nonce', ARGV[7])
  redis.call('HINCRBY', KEYS[1], 'tries', 1)
end
redis.call('PEXPIRE', KEYS[1], ARGV[6])
local t = redis.call('TIME')
return {'open', t[1] * 1000 + math.floor(t[2] / 1000), redis.call('HGETALL', KEYS[1])}
