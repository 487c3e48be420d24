-- Prepended to draw.lua and settle.lua: one tenant's use, a hash.
--
--   r, t        requests and tokens left, as decimal text
--   a           when r and t were written, in microseconds of the server
--   n:<replica> <sequence> <requests in flight there> <when that expires, in ms of the server>
--
-- Malformed values count as absent: a full bucket, a replica with nothing in flight. A replica's count has a
-- lease, so that a replica that died does not hold its tenants' places forever.

local MINUTE_US = 60 * 1000000

local function level(number)
  return string.format('%.6f', number)
end

local function refilled(text, per_minute, elapsed_us)
  local left = tonumber(text or '')
  if not left or left ~= left then
    return per_minute
  end
  return math.min(per_minute, left + per_minute * elapsed_us / MINUTE_US)
end

local function read_use(key, requests_per_minute, tokens_per_minute)
  local now_us = server_time_us()
  local row = redis.call('HMGET', key, 'r', 't', 'a')
  local elapsed_us = math.max(0, now_us - (tonumber(row[3] or '') or now_us))
  return {
    now_us = now_us,
    requests_per_minute = requests_per_minute,
    tokens_per_minute = tokens_per_minute,
    requests_left = refilled(row[1], requests_per_minute, elapsed_us),
    tokens_left = refilled(row[2], tokens_per_minute, elapsed_us),
  }
end

-- The hash expires when both buckets are full and all leases are over: then its absence means the same.
local function write_use(key, use, lease_ms)
  redis.call('HSET', key, 'r', level(use.requests_left), 't', level(use.tokens_left),
    'a', digits(use.now_us))
  local full_ms = 0
  if use.requests_per_minute > 0 then
    full_ms = (1 - use.requests_left / use.requests_per_minute) * 60000
  end
  if use.tokens_per_minute > 0 then
    full_ms = math.max(full_ms, (1 - use.tokens_left / use.tokens_per_minute) * 60000)
  end
  redis.call('PEXPIRE', key, digits(math.ceil(math.max(full_ms, lease_ms)) + 1000))
end

-- Requests in flight on all other replicas. Removes expired leases.
local function num_in_flight_elsewhere(key, replica)
  local now_ms = math.floor(server_time_us() / 1000)
  local fields = redis.call('HGETALL', key)
  local sum = 0
  for number = 1, #fields, 2 do
    local other = string.match(fields[number], '^n:(.*)$')
    if other and other ~= replica then
      local count, void_ms = string.match(fields[number + 1], '^%d+ (%d+) (%d+)$')
      if not count or tonumber(void_ms) <= now_ms then
        redis.call('HDEL', key, fields[number])
      else
        sum = sum + tonumber(count)
      end
    end
  end
  return sum
end

-- Commands of one replica may arrive out of order: only the latest counts.
local function note_in_flight(key, replica, sequence, count, lease_ms)
  local field = 'n:' .. replica
  local known = string.match(redis.call('HGET', key, field) or '', '^(%d+) ')
  if known and tonumber(known) >= sequence then
    return
  end
  local void_ms = math.floor(server_time_us() / 1000) + lease_ms
  redis.call('HSET', key, field, digits(sequence) .. ' ' .. digits(count) .. ' ' .. digits(void_ms))
end
