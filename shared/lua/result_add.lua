-- Tokens and text of a submission go out, each index once, and only from its owner.
-- KEYS: sub result [reply]      ARGV: owner ttl_ms id entry (choice offset count chars tokens text)...   (chars: with it)
-- 1 = out, 0 = another gateway or entry has it, -1 = not where the last item ended. Repeatable: what is out is skipped.
local s = redis.call('HMGET', KEYS[1], 'owner', 'state', 'total', 'seq', 'entry')
if s[1] ~= ARGV[1] or s[2] ~= 'open' or s[5] ~= ARGV[4] then return 0 end
redis.call('XDEL', KEYS[2], '0-0')  -- frees first: see scripts.py
local total, seq = tonumber(s[3]), tonumber(s[4])
for a = 5, #ARGV, 6 do
  local n, c = 'n:' .. ARGV[a], 'c:' .. ARGV[a]
  local out = redis.call('HMGET', KEYS[1], n, c)
  local tokens, chars = tonumber(out[1] or '0'), tonumber(out[2] or '0')
  local offset, count = tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2])
  if offset + count > tokens or tonumber(ARGV[a + 3]) > chars then
    if offset ~= tokens then return -1 end
    total = total + count
    seq = count > 0 and 0 or seq + 1
    local item = {'choice', ARGV[a], 'offset', ARGV[a + 1], 'tokens', ARGV[a + 4], 'text', ARGV[a + 5]}
    redis.call('XADD', KEYS[2], total .. '-' .. seq, unpack(item))
    if KEYS[3] then redis.call('XADD', KEYS[3], '*', 'id', ARGV[3], unpack(item)) end
    redis.call('HSET', KEYS[1], n, offset + count, c, ARGV[a + 3], 'total', total, 'seq', seq, 'tries', 0)
  end
end
for i = 1, #KEYS do redis.call('PEXPIRE', KEYS[i], ARGV[2]) end
return 1
