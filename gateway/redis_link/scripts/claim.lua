-- Bind a session that has no home; the first claim wins.
-- KEYS: session, index prefix, names
-- ARGV: backend, epoch, context_tokens, ttl_ms, member, least version
-- Returns {value, ttl_ms} of the home that the session has now, ours or another.

local held = held_binding(KEYS[1])
if held then
  return {held.value, held.ttl_ms}
end
local now_us = server_time_us()
local ttl_ms = tonumber(ARGV[4])
-- The version is the server's time in microseconds, greater than any earlier version of this key. If the
-- server's clock is behind (after a fail-over), the caller's least version keeps the order.
local home = {
  version = digits(math.max(now_us, tonumber(ARGV[6]))), epoch = ARGV[2], context_tokens = ARGV[3], num_turns = '0', backend = ARGV[1],
}
return {write_home(KEYS[1], KEYS[2], KEYS[3], ARGV[5], home, ttl_ms, now_us), ttl_ms}
