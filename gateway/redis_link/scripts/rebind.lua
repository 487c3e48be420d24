-- Move a session if its version is the expected one.
-- KEYS: session, index prefix, names
-- ARGV: backend, epoch, context_tokens, ttl_ms, member, expected version, channel
-- Returns {value, ttl_ms} of the home that the session has now; 0 if there is no such session.

local held = held_binding(KEYS[1])
if not held then
  return 0
end
if held.version ~= ARGV[6] then
  return {held.value, held.ttl_ms}
end
local now_us = server_time_us()
local ttl_ms = tonumber(ARGV[4])
-- Versions grow even if the clock of the server is behind (after a fail-over).
local home = {
  version = digits(math.max(now_us, tonumber(held.version) + 1)),
  epoch = ARGV[2], context_tokens = ARGV[3], num_turns = held.num_turns, backend = ARGV[1],
}
redis.call('ZREM', KEYS[2] .. held.backend, ARGV[5])
local value = write_home(KEYS[1], KEYS[2], KEYS[3], ARGV[5], home, ttl_ms, now_us)
announce(ARGV[7], home.version, ARGV[5])
return {value, ttl_ms}
