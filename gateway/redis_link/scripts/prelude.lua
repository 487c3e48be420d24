-- Prepended to every script of this folder.

local function server_time_us()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end

-- Whole numbers up to 2^53, without the exponent that tostring would write.
local function digits(number)
  return string.format('%.0f', number)
end
