-- Extend many sessions of one shard and store their new size, each only if its version is the given one.
-- KEYS: index prefix, names, session prefix
-- ARGV: ttl_ms, then one text for each session: "<version> <context_tokens> <num_turns> <member>"
-- Returns {number, value, ttl_ms} for each session that was not extended, counted from 1: its current home, or
-- '' and 0 if there is no such session. The usual reply is empty.

local now_us = server_time_us()
local ttl_ms = tonumber(ARGV[1])
local refused = {}
for number = 1, #ARGV - 1 do
  local version, context_tokens, num_turns, member =
    string.match(ARGV[number + 1], '^(%d+) (%d+) (%d+) (.*)$')
  local session = KEYS[3] .. member
  local held = held_binding(session)
  if not held then
    refused[#refused + 1] = {number, '', 0}
  elseif held.version ~= version then
    refused[#refused + 1] = {number, held.value, held.ttl_ms}
  else
    held.context_tokens = context_tokens
    held.num_turns = digits(math.max(tonumber(held.num_turns), tonumber(num_turns)))
    write_home(session, KEYS[1], KEYS[2], member, held, ttl_ms, now_us)
  end
end
return refused
