-- A request of a key is over, and cost so many tokens (-1: what was charged): the rest of its charge goes back.
-- KEYS: bucket busy             ARGV: id tokens_per_minute tokens
-- 1 = given back, 0 = nothing to give. Repeatable: the charge is known until the first call.
local name, cost = 'c:' .. ARGV[1], tonumber(ARGV[3])
local charged = tonumber(redis.call('HGET', KEYS[1], name))
redis.call('HDEL', KEYS[1], name)
if redis.call('ZREM', KEYS[2], ARGV[1]) == 0 or not charged or cost < 0 then return 0 end
local left = tonumber(redis.call('HGET', KEYS[1], 't') or 0) + charged - cost
redis.call('HSET', KEYS[1], 't', tostring(math.min(tonumber(ARGV[2]), left)))
return 1
