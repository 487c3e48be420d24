-- Charge a tenant for one request if all its limits have room for it; limits/allowance.py is the same rule.
-- KEYS: the tenant's ledger
-- ARGV: max_in_flight, requests_per_minute, tokens_per_minute (each 0 for no limit), tokens,
--       replica, sequence, num_in_flight of this replica with this request, lease_ms
-- Returns the cause of a refusal or '', requests_left, tokens_left; levels as text.

local ledger = read_ledger(KEYS[1], tonumber(ARGV[2]), tonumber(ARGV[3]))
local max_in_flight, tokens = tonumber(ARGV[1]), tonumber(ARGV[4])
local cause = ''
if max_in_flight > 0 and num_in_flight_elsewhere(KEYS[1], ARGV[5]) + tonumber(ARGV[7]) > max_in_flight then
  cause = 'tenant_in_flight'
elseif ledger.requests_per_minute > 0 and ledger.requests_left < 1 then
  cause = 'tenant_requests'
elseif ledger.tokens_per_minute > 0
    and ledger.tokens_left < math.min(math.max(tokens, 1), ledger.tokens_per_minute) then
  cause = 'tenant_tokens'
end
if cause == '' then
  ledger.requests_left = ledger.requests_left - 1
  ledger.tokens_left = ledger.tokens_left - tokens
  if max_in_flight > 0 then
    note_in_flight(KEYS[1], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]))
  end
end
write_ledger(KEYS[1], ledger, tonumber(ARGV[8]))
return { cause, level(ledger.requests_left), level(ledger.tokens_left) }
