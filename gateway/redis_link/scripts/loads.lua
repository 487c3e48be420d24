-- Write this replica's load and read that of the others.
-- KEYS: loads (or replicas, or news: presence.py and news.py use this script too)
-- ARGV: replica, payload, lifetime_ms
-- Returns the payloads of the other replicas that wrote within the lifetime. Older ones are removed.

local now_ms = math.floor(server_time_us() / 1000)
local lifetime_ms = tonumber(ARGV[3])
redis.call('HSET', KEYS[1], ARGV[1], digits(now_ms) .. ' ' .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], digits(lifetime_ms))
local fields = redis.call('HGETALL', KEYS[1])
local payloads = {}
for number = 1, #fields, 2 do
  local written_ms, payload = string.match(fields[number + 1], '^(%d+) (.*)$')
  if not written_ms or tonumber(written_ms) + lifetime_ms <= now_ms then
    redis.call('HDEL', KEYS[1], fields[number])
  elseif fields[number] ~= ARGV[1] then
    payloads[#payloads + 1] = payload
  end
end
return payloads
