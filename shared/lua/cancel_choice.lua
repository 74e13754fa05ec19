-- The client has all of one choice: its decode worker, which has it at this epoch, is told. A hint: who misses it goes on.
-- KEYS: req control_d       ARGV: epoch decode cancel_msg control_ms       1 = told, 0 = nobody to tell
local r = redis.call('HMGET', KEYS[1], 'st', 'ep', 'dw')
if r[1] ~= 'dispatched' and r[1] ~= 'prefill' and r[1] ~= 'decode' then return 0 end
if r[2] ~= ARGV[1] or r[3] ~= ARGV[2] then return 0 end
redis.call('XDEL', KEYS[2], '0-0')  -- frees first: see scripts.py
redis.call('XADD', KEYS[2], '*', 'm', ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 1
