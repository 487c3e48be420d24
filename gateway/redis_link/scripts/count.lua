-- Count the live sessions of each backend in one shard.
-- KEYS: names, index prefix
-- ARGV: none
-- Returns {backend, count, backend, count, ...}. Backends without an index are removed.

local now_ms = digits(math.floor(server_time_us() / 1000))
local counts = {}
for _, backend in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local index = KEYS[2] .. backend
  local count = redis.call('ZCOUNT', index, '(' .. now_ms, '+inf')
  if count > 0 then
    counts[#counts + 1] = backend
    counts[#counts + 1] = count
  elseif redis.call('EXISTS', index) == 0 then
    redis.call('SREM', KEYS[1], backend)
  end
end
return counts
