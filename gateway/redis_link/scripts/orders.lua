-- Add orders to the board, remove those that are to be forgotten, and read what is there then.
-- KEYS: orders
-- ARGV: lifetime_ms, number of orders told, name and text of each, then name and text of each to forget
-- Constants: MAX_MS, MAX_AUTHOR_LENGTH; order_book.py reads orders by the same rule
-- Returns names and texts in turn.
--
-- An order replaces an earlier one only (replicas/order_book.py says which is later), so a command that Redis
-- carries out late, or twice, changes nothing that was ordered since. Writes may fail, because Redis is full
-- or read-only: then the board is read all the same, and shows what it has not taken.

local board = KEYS[1]

local function is_time(value)
  return type(value) == 'number' and value >= 0 and value <= MAX_MS and value % 1 == 0
end

-- An order that has no readable version is earlier than all others: it would stand for ever.
local function rank(text)
  local ok, order = pcall(cjson.decode, text)
  if not ok or type(order) ~= 'table' or not string.find(text, '^%s*{') then
    return -1, '', 0
  end
  local ms, author, renewed_ms = order.ms or 0, order.author or '', order.renewed_ms or 0
  if not is_time(ms) or not is_time(renewed_ms) or type(author) ~= 'string' or #author > MAX_AUTHOR_LENGTH
      or string.find(author, '[^ -~]') then
    return -1, '', 0
  end
  return ms, author, renewed_ms
end

local function is_later(text, other)
  local ms, author, renewed_ms = rank(text)
  local other_ms, other_author, other_renewed_ms = rank(other)
  if ms ~= other_ms then
    return ms > other_ms
  elseif author ~= other_author then
    return author > other_author
  end
  return renewed_ms > other_renewed_ms
end

local num_told = tonumber(ARGV[2])
for number = 1, (#ARGV - 2) / 2 do
  local name, text = ARGV[2 * number + 1], ARGV[2 * number + 2]
  local stored = redis.call('HGET', board, name)
  if number <= num_told then
    if not stored or is_later(text, stored) then
      redis.pcall('HSET', board, name, text)
    end
  elseif stored and not is_later(stored, text) then
    redis.pcall('HDEL', board, name)
  end
end
redis.pcall('PEXPIRE', board, ARGV[1])
return redis.call('HGETALL', board)
