"""The names of everything the gateway keeps in Redis.

A script may touch keys of one Cluster slot only, so sessions are split into shards, and the shard's number is
the hash tag of all its keys. Without a Cluster there is one shard, and one script call can renew any batch.

    homing:{07}:s:<session key>   string   one binding, see sessions/codec.py
    homing:{07}:b:<backend id>    zset     that backend's sessions in this shard, scored by expiry (ms)
    homing:{07}:names             set      backends that have an index in this shard
    homing:{07}:probe             string   written to test whether the shard accepts writes
    homing:{00}:load              hash     replica -> its load, see replicas/loads.py
    homing:{00}:news              hash     replica -> what it has sent lately, see replicas/news.py
    homing:{00}:orders            hash     backend id -> latest order, see replicas/order_book.py
    homing:{00}:replicas          hash     replica -> its report, see replicas/presence.py
    homing:{07}:t:<tenant hash>   hash     what a tenant has left, see replicas/tenant_use.py
    homing:{00}:api_keys          hash     SHA-256 of an API key -> tenant, see tenants/redis_keys.py
    homing:objects:{07}:…         as sessions, one binding for each object that an engine has handed out
    homing:moves                  channel  "<version> <session key>": older copies are void
    homing:beat:<replica>         channel  a replica's own heartbeat
"""

from __future__ import annotations

import zlib

from gateway.values import BackendId, SessionKey

NUM_CLUSTER_SHARDS = 64  # several per node for up to a few dozen nodes; each costs one call per flush


class KeyLayout:
    """Builds the key names."""

    def __init__(self, prefix: str, num_shards: int) -> None:
        self.num_shards = num_shards
        self._shards = [f"{prefix}:{{{shard:02d}}}" for shard in range(num_shards)]
        self.moves_channel = f"{prefix}:moves"
        self.loads = f"{self._shards[0]}:load"
        self.news = f"{self._shards[0]}:news"
        self.orders = f"{self._shards[0]}:orders"
        self.replicas = f"{self._shards[0]}:replicas"
        self.api_keys = f"{self._shards[0]}:api_keys"
        self._prefix = prefix

    def for_objects(self) -> KeyLayout:
        """Return the same names for objects that engines keep, apart from those of sessions."""
        return KeyLayout(f"{self._prefix}:objects", self.num_shards)

    def shard_of(self, key: str) -> int:
        """Return the shard. CRC-32, because Python's hash is salted per process and replicas must agree."""
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
