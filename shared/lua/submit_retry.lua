-- A dead letter is submitted again, under its id; the old result is forgotten.
-- KEYS: submit dead sub result   ARGV: dead_entry (name value)...
-- The new entry's id; '' = no such letter; 'open' = the id is in work again already.
if redis.call('HGET', KEYS[3], 'state') == 'open' then return 'open' end
if redis.call('XDEL', KEYS[2], ARGV[1]) == 0 then return '' end
redis.call('DEL', KEYS[3], KEYS[4])
return redis.call('XADD', KEYS[1], '*', unpack(ARGV, 2))
