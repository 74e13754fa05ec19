-- The last of a dead gateway: after all that it had open was cancelled. Nothing happens if it has come back.
-- KEYS: gateways open tokens    ARGV: incarnation
local deadline = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not deadline or tonumber(deadline) > 0 or redis.call('SCARD', KEYS[2]) > 0 then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[3])
return 1
