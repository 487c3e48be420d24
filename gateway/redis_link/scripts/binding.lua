-- Prepended to the scripts that read or write bindings.
--
-- A session's value is text:   1 <version> <epoch> <context_tokens> <num_turns> <backend_id>
-- Anything else, and a value without a time to live, counts as absent and may be overwritten: values in Redis
-- are not trusted. sessions/codec.py reads values by the same rule, and gives this script its constants:
-- VALUE, MAX_VALUE_BYTES, VERSION_DIGITS, EPOCH_DIGITS, TOKENS_DIGITS, TURNS_DIGITS, MAX_NAME_LENGTH.
--
-- All keys of a script share one hash tag. Some are computed here from a prefix in KEYS: the index of a former
-- home, known only after the value has been read, and the sessions of a batch, passed only as members.

-- Returns the binding of a session key, or nil. The second result is true if the value is malformed.
local function held_binding(session)
  local value = redis.pcall('GET', session)
  if value == false then
    return nil, false
  end
  if type(value) ~= 'string' or #value > MAX_VALUE_BYTES then
    return nil, true
  end
  local version, epoch, context_tokens, num_turns, backend = string.match(value, VALUE)
  if not version or #version > VERSION_DIGITS or #epoch > EPOCH_DIGITS or #context_tokens > TOKENS_DIGITS
      or #num_turns > TURNS_DIGITS or #backend > MAX_NAME_LENGTH then
    return nil, true
  end
  local ttl_ms = redis.call('PTTL', session)
  if ttl_ms < 0 then
    return nil, true
  end
  return {
    value = value, ttl_ms = ttl_ms, version = version, epoch = epoch,
    context_tokens = context_tokens, num_turns = num_turns, backend = backend,
  }, false
end

-- Writes a home and its entry in the index of its backend, whose score is the time of expiry in ms. Removes a
-- few expired entries of that index. Returns the value written.
local function write_home(session, index_prefix, names, member, home, ttl_ms, now_us)
  local value = '1 ' .. home.version .. ' ' .. home.epoch .. ' ' .. home.context_tokens
    .. ' ' .. home.num_turns .. ' ' .. home.backend
  redis.call('SET', session, value, 'PX', ttl_ms)
  local now_ms = math.floor(now_us / 1000)
  local index = index_prefix .. home.backend
  redis.call('ZADD', index, digits(now_ms + ttl_ms), member)
  local expired = redis.call('ZRANGEBYSCORE', index, '-inf', digits(now_ms), 'LIMIT', 0, 4)
  if #expired > 0 then
    redis.call('ZREM', index, unpack(expired))
  end
  -- Index and names expire one minute after their last session.
  redis.call('PEXPIRE', index, digits(ttl_ms + 60000))
  redis.call('SADD', names, home.backend)
  redis.call('PEXPIRE', names, digits(ttl_ms + 60000))
  return value
end

-- Tells the other replicas that their copies of this session below this version are void. If the ACL forbids
-- the channel the move still happens; the others notice when they no longer trust their copy.
local function announce(channel, version, member)
  redis.pcall('PUBLISH', channel, version .. ' ' .. member)
end
