"""Opens, queries and closes the tiers below the device for the engine.

Decides in which tier a block hash is found (host before disk), and the order at start and end: the disk's
index is complete before the first request, and what is queued is written, within a time limit, before the
folder is unlocked. `tier_stores` copies blocks down, `tier_loads` brings them back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from engine_adapter.engine.kv.block_hash import BlockHash
from engine_adapter.engine.kv.block_manager import BlockManager
from engine_adapter.engine.kv.kv_storage import KVStorage
from engine_adapter.engine.kv.tiers.disk_tier import DiskTier
from engine_adapter.engine.kv.tiers.disk_writer import DiskWriter
from engine_adapter.engine.kv.tiers.host_tier import HostTier
from engine_adapter.engine.kv.tiers.tier_block import Tier
from engine_adapter.engine.kv.tiers.tier_config import TierConfig, TierStats
from engine_adapter.engine.kv.tiers.tier_loads import TierLoads
from engine_adapter.engine.kv.tiers.tier_stores import TierStores
from paged_kv.transfers import BlockTransfers


class KVTiers:
    """Host and disk tier below one engine's device blocks. Single-threaded, like the engine."""

    def __init__(
        self,
        config: TierConfig,
        *,
        storage: KVStorage,
        blocks: BlockManager,
        transfers: BlockTransfers,
        root: BlockHash,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the tiers.

        Raises:
            ValueError: a tier is too small for a block, or the folder is locked or not writable.
        """
        self._config = config
        self._storage = storage
        self._block_size = blocks.block_size
        self._host: HostTier | None = None
        if config.host_bytes:
            self._host = HostTier(max_bytes=config.host_bytes, block_bytes=storage.block_bytes)
        self._disk = _open_disk(config, storage.block_bytes, blocks.block_bytes, root)
        self._writer = DiskWriter(self._disk) if self._disk is not None else None
        self.loads = TierLoads(
            host=self._host,
            disk=self._disk,
            storage=storage,
            blocks=blocks,
            transfers=transfers,
            clock=clock,
        )
        self.stores = TierStores(
            host=self._host,
            writer=self._writer,
            storage=storage,
            cache=blocks.prefix_cache,
            transfers=transfers,
        )

    def find(self, block_hash: BlockHash) -> Tier | None:
        """Return the fastest tier that has a block. Changes nothing."""
        if self._host is not None and self._host.get(block_hash) is not None:
            return Tier.HOST
        if self._disk is not None and self._disk.find(block_hash) is not None:
            return Tier.DISK
        return None

    def count_following(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """Return how many tokens of a chain's head could be loaded now, by tier. Changes nothing."""
        counts = dict.fromkeys((tier.value for tier in Tier), 0)
        for block_hash in hashes:
            tier = self.find(block_hash)
            if tier is None:
                break
            counts[tier.value] += self._block_size
        return counts

    def observe_step(self, num_prompt_tokens: int, duration_s: float) -> None:
        """Record how long computing takes on this machine."""
        self.loads.planner.observe_prefill(num_prompt_tokens, duration_s)

    def clear(self) -> int:
        """Forget everything in both tiers; return the number of blocks."""
        self.stores.drop()
        num_blocks = self._host.clear() if self._host is not None else 0
        if self._disk is not None and self._writer is not None:
            num_blocks += len(self._disk)
            self._writer.clear()
        return num_blocks

    def close(self) -> None:
        """Write what is queued, within a time limit, and unlock the folder. Idempotent."""
        self.stores.settle()
        self.loads.close()
        if self._writer is not None:
            self._writer.close()

    def stats(self) -> dict[str, TierStats]:
        """Return the counters of the configured tiers, by name. Changes nothing."""
        stats: dict[str, TierStats] = {}
        if self._host is not None:
            stats[Tier.HOST.value] = TierStats(
                num_blocks=len(self._host),
                num_bytes=len(self._host) * self._storage.block_bytes,
                max_bytes=self._config.host_bytes,
                num_hit_tokens=self.loads.hit_tokens[Tier.HOST],
                num_loaded_bytes=self.loads.loaded_bytes[Tier.HOST],
                num_stored_blocks=self.stores.num_host_stored,
                num_evicted_blocks=self._host.num_evictions,
                num_damaged_blocks=self.loads.num_host_damaged,
                read_bytes_per_s=self.loads.planner.read_bytes_per_s.get(Tier.HOST),
            )
        if self._disk is not None and self._writer is not None:
            stats[Tier.DISK.value] = TierStats(
                num_blocks=len(self._disk),
                num_bytes=self._disk.num_bytes,
                max_bytes=self._config.disk_bytes,
                num_hit_tokens=self.loads.hit_tokens[Tier.DISK],
                num_loaded_bytes=self.loads.loaded_bytes[Tier.DISK],
                num_stored_blocks=self._writer.num_written,
                num_evicted_blocks=self._disk.num_evictions,
                num_damaged_blocks=self._disk.num_damaged,
                num_dropped_blocks=self._writer.num_dropped,
                num_write_errors=self._writer.num_errors,
                read_bytes_per_s=self.loads.planner.read_bytes_per_s.get(Tier.DISK),
            )
        return stats


def _open_disk(config: TierConfig, block_bytes: int, token_bytes: int, root: BlockHash) -> DiskTier | None:
    if config.disk_path is None:
        return None
    return DiskTier(
        config.disk_path,
        max_bytes=config.disk_bytes,
        block_bytes=block_bytes,
        token_bytes=token_bytes,
        root=root,
    )
