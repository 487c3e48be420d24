-- One page of the sessions of one backend in one shard, soonest to expire first.
-- KEYS: index, session prefix
-- ARGV: least score, offset, limit, backend
-- Returns {score, member, value, ttl_ms} for each; value is '' if the session has ended or moved.

local now_ms = math.floor(server_time_us() / 1000)
local least = ARGV[1]
if tonumber(least) <= now_ms then
  least = '(' .. digits(now_ms)
end
local found = redis.call('ZRANGEBYSCORE', KEYS[1], least, '+inf', 'WITHSCORES', 'LIMIT', ARGV[2], ARGV[3])
local rows = {}
for number = 1, #found, 2 do
  local held = held_binding(KEYS[2] .. found[number])
  if held and held.backend == ARGV[4] then
    rows[#rows + 1] = {found[number + 1], found[number], held.value, held.ttl_ms}
  else
    rows[#rows + 1] = {found[number + 1], found[number], '', 0}
  end
end
return rows
