-- Correct what a tenant was charged, and note how many of its requests are under way on this replica.
-- KEYS: the tenant's ledger
-- ARGV: max_in_flight, requests_per_minute, tokens_per_minute (each 0 for no limit), tokens more than charged,
--       replica, sequence, num_in_flight of this replica, lease_ms
-- Returns nothing.

local ledger = read_ledger(KEYS[1], tonumber(ARGV[2]), tonumber(ARGV[3]))
ledger.tokens_left = ledger.tokens_left - tonumber(ARGV[4])
if tonumber(ARGV[1]) > 0 then
  note_in_flight(KEYS[1], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]))
end
write_ledger(KEYS[1], ledger, tonumber(ARGV[8]))
