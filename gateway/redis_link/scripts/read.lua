-- Read the binding of a session.
-- KEYS: session
-- ARGV: none
-- Returns {value, ttl_ms}; 0 if absent; -1 if the value is malformed.

local held, is_odd = held_binding(KEYS[1])
if held then
  return {held.value, held.ttl_ms}
end
return is_odd and -1 or 0
