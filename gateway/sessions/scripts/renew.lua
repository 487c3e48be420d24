-- Extend many sessions of one shard and note their new size, each only if its version is the given one.
-- KEYS: index prefix, names, session...
-- ARGV: ttl_ms, then for each session: version, context_tokens, num_turns, member
-- Returns for each session: 1 if extended, 0 if there is no such session, or {value, ttl_ms} of its newer home.

local now_us = server_time_us()
local ttl_ms = tonumber(ARGV[1])
local replies = {}
for number = 1, #KEYS - 2 do
  local session = KEYS[number + 2]
  local first = (number - 1) * 4 + 2
  local version, context_tokens, num_turns, member = ARGV[first], ARGV[first + 1], ARGV[first + 2], ARGV[first + 3]
  local held = held_binding(session)
  if not held then
    replies[number] = 0
  elseif held.version ~= version then
    replies[number] = {held.value, held.ttl_ms}
  else
    held.context_tokens = context_tokens
    held.num_turns = digits(math.max(tonumber(held.num_turns), tonumber(num_turns)))
    write_home(session, KEYS[1], KEYS[2], member, held, ttl_ms, now_us)
    replies[number] = 1
  end
end
return replies
