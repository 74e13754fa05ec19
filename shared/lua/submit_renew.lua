-- The owner's submissions look busy (idle_ms 0), or are given up for others to take (idle_ms beyond the lease).
-- KEYS: submit (sub result)...  ARGV: owner group idle_ms ttl_ms entry...
-- Per submission: 1 = still the owner's, 0 = it has ended, or another gateway or entry has it. Repeatable.
local out = {}
for i = 1, (#KEYS - 1) / 2 do
  local sub, entry = KEYS[2 * i], ARGV[4 + i]
  local s = redis.call('HMGET', sub, 'owner', 'state', 'entry')
  out[i] = 0
  if s[1] == ARGV[1] and s[2] == 'open' and s[3] == entry then
    redis.call('XCLAIM', KEYS[1], ARGV[2], ARGV[1], 0, entry, 'IDLE', ARGV[3], 'JUSTID')
    redis.call('PEXPIRE', sub, ARGV[4])
    redis.call('PEXPIRE', KEYS[2 * i + 1], ARGV[4])
    out[i] = 1
  end
end
return out
