"""Remembers which blocks were evicted, to explain misses and to report evictions.

Bounded: the oldest are dropped first. What is remembered is a hash and a time, never tokens or KV; only
evictions not yet reported keep their whole entry.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from engine_adapter.engine.kv.block_hash import BlockHash
from engine_adapter.engine.kv.prefix_cache import CachedBlock

DEFAULT_CAPACITY = 65_536  # hashes: about 10 MB, one million tokens at 16 per block


class EvictionLog:
    """Hash → when its block was evicted."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY, clock: Callable[[], float] = monotonic) -> None:
        self.num_evictions = 0
        self._capacity = capacity
        self._clock = clock
        self._evicted_at_s: dict[BlockHash, float] = {}
        self._unreported: list[CachedBlock] = []

    def record(self, entry: CachedBlock) -> None:
        self.num_evictions += 1
        self._unreported.append(entry)
        self._evicted_at_s.pop(entry.block_hash, None)
        self._evicted_at_s[entry.block_hash] = self._clock()
        if len(self._evicted_at_s) > self._capacity:
            del self._evicted_at_s[next(iter(self._evicted_at_s))]

    def evicted_at_s(self, block_hash: BlockHash) -> float | None:
        return self._evicted_at_s.get(block_hash)

    def take_unreported(self) -> list[CachedBlock]:
        """Return the evictions since the last call, oldest first, for the KV event stream."""
        taken, self._unreported = self._unreported, []
        return taken
