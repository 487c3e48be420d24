-- Forget a session.
-- KEYS: session, index prefix
-- ARGV: member, channel
-- Returns 1 if there was one, else 0.

local held = held_binding(KEYS[1])
if not held then
  return 0
end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2] .. held.backend, ARGV[1])
announce(ARGV[2], digits(tonumber(held.version) + 1), ARGV[1])
return 1
