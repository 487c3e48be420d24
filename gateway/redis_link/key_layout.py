"""The names of everything we keep in Redis.

A script may touch keys of one Cluster slot only, so sessions are dealt into shards, and a shard's number is
the hash tag of all its keys. Without a Cluster there is one shard: then one script call can renew them all.

    homing:{07}:s:<session key>   string   one binding, see codec.py
    homing:{07}:b:<backend id>    zset     that backend's sessions in this shard, by time of expiry (ms)
    homing:{07}:names             set      backends that have an index in this shard
    homing:{07}:probe             string   written to learn whether the shard can be written
    homing:{00}:load              hash     replica -> its load, see loads.py
    homing:{00}:orders            hash     backend id -> what operators asked for, see orders.py
    homing:{00}:replicas          hash     replica -> what it tells of itself, see presence.py
    homing:{07}:t:<tenant hash>   hash     what a tenant has left of its limits, see tenant_use.py
    homing:{00}:api_keys          hash     SHA-256 of an API key -> tenant, see key_book.py
    homing:moves                  channel  "<version> <session key>": older copies are void
    homing:beat:<replica>         channel  a replica's own heartbeat
"""

from __future__ import annotations

import zlib

from gateway.values import BackendId, SessionKey

NUM_CLUSTER_SHARDS = 64  # several per node up to a few dozen nodes; each costs one call per flush


class KeyLayout:
    """Builds key names; changes nothing."""

    def __init__(self, prefix: str, num_shards: int) -> None:
        self.num_shards = num_shards
        self._shards = [f"{prefix}:{{{shard:02d}}}" for shard in range(num_shards)]
        self.moves_channel = f"{prefix}:moves"
        self.loads = f"{self._shards[0]}:load"
        self.orders = f"{self._shards[0]}:orders"
        self.replicas = f"{self._shards[0]}:replicas"
        self.api_keys = f"{self._shards[0]}:api_keys"
        self._prefix = prefix

    def shard_of(self, key: str) -> int:
        """The same on every replica: CRC-32, not Python's hash, which is salted per process."""
        if self.num_shards == 1:
            return 0
        return zlib.crc32(key.encode("utf-8", "surrogatepass")) % self.num_shards

    def session(self, shard: int, key: SessionKey) -> str:
        return f"{self._shards[shard]}:s:{key}"

    def index_prefix(self, shard: int) -> str:
        return f"{self._shards[shard]}:b:"

    def index(self, shard: int, backend_id: BackendId) -> str:
        return f"{self._shards[shard]}:b:{backend_id}"

    def names(self, shard: int) -> str:
        return f"{self._shards[shard]}:names"

    def tenant(self, shard: int, tenant_hash: str) -> str:
        return f"{self._shards[shard]}:t:{tenant_hash}"

    def probe(self, shard: int) -> str:
        return f"{self._shards[shard]}:probe"

    def beat_channel(self, replica: str) -> str:
        return f"{self._prefix}:beat:{replica}"
