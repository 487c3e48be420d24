-- Correct what a tenant was charged, and store how many of its requests are in flight on this replica.
-- KEYS: the tenant's use
-- ARGV: max_in_flight, requests_per_minute, tokens_per_minute (each 0 for no limit), tokens used beyond the charge,
--       replica, sequence, num_in_flight of this replica, lease_ms
-- Returns nothing.

local use = read_use(KEYS[1], tonumber(ARGV[2]), tonumber(ARGV[3]))
use.tokens_left = use.tokens_left - tonumber(ARGV[4])
if tonumber(ARGV[1]) > 0 then
  note_in_flight(KEYS[1], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]))
end
write_use(KEYS[1], use, tonumber(ARGV[8]))
