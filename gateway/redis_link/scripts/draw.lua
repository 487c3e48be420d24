-- Charge a tenant for one request if all its limits allow it. limits/allowance.py applies the same rule.
-- KEYS: the tenant's use
-- ARGV: max_in_flight, requests_per_minute, tokens_per_minute (each 0 for no limit), tokens,
--       replica, sequence, num_in_flight of this replica with this request, lease_ms
-- Constants: IN_FLIGHT, REQUESTS, TOKENS, the causes of a refusal
-- Returns a cause or '', requests_left, tokens_left; levels as text.

local use = read_use(KEYS[1], tonumber(ARGV[2]), tonumber(ARGV[3]))
local max_in_flight, tokens = tonumber(ARGV[1]), tonumber(ARGV[4])
local cause = ''
if max_in_flight > 0 and num_in_flight_elsewhere(KEYS[1], ARGV[5]) + tonumber(ARGV[7]) > max_in_flight then
  cause = IN_FLIGHT
elseif use.requests_per_minute > 0 and use.requests_left < 1 then
  cause = REQUESTS
elseif use.tokens_per_minute > 0 and tokens > 0
    and use.tokens_left < math.min(tokens, use.tokens_per_minute) then
  cause = TOKENS
end
if cause == '' then
  use.requests_left = use.requests_left - 1
  use.tokens_left = use.tokens_left - tokens
  if max_in_flight > 0 then
    note_in_flight(KEYS[1], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]))
  end
end
write_use(KEYS[1], use, tonumber(ARGV[8]))
return { cause, level(use.requests_left), level(use.tokens_left) }
