-- Tokens go out: fence checked and token log appended per request, then ONE entry on the gateway's stream.
-- KEYS: tokens (req log)...     ARGV: (epoch attempt index packed_u32 item)...
-- Per item: 1 = out, 0 = stale, -1 = gap (the log is shorter than index). Repeatable: what the log has is not sent again.
local out, entry = {}, {}
redis.call('XDEL', KEYS[1], '0-0')  -- frees first: see scripts.py
for i = 1, (#KEYS - 1) / 2 do
  local req, log, a = KEYS[2 * i], KEYS[2 * i + 1], 5 * (i - 1)
  local r = redis.call('HMGET', req, 'ep', 'at', 'st')
  local live = r[3] == 'dispatched' or r[3] == 'prefill' or r[3] == 'decode'
  if not live or r[1] ~= ARGV[a + 1] or r[2] ~= ARGV[a + 2] then
    out[i] = 0
  else
    local have, index = redis.call('STRLEN', log) / 4, tonumber(ARGV[a + 3])
    if index > have then
      out[i] = -1
    else
      out[i] = 1
      local fresh = string.sub(ARGV[a + 4], (have - index) * 4 + 1)
      if #fresh > 0 then
        redis.call('APPEND', log, fresh)
        entry[#entry + 1] = 'm'
        entry[#entry + 1] = ARGV[a + 5]
      end
    end
  end
end
if #entry > 0 then redis.call('XADD', KEYS[1], '*', unpack(entry)) end
return out
