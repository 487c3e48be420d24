"""Copies newly cached blocks from the device to the tiers, head of a chain first.

Blocks are stored when they are cached, not when they are evicted, so that a restart, planned or not, finds
them, and preemption needs no swapping: a preempted sequence's blocks are already in a tier. Ancestors that a
tier lacks (the writer was behind, a file was deleted) are stored again with the next block of their chain, if
the device still has them.

Invariant: a tier gets bytes only after their copy is complete, with a checksum computed from those bytes.
Single-threaded, like the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

import torch

from engine_adapter.engine.kv.block_hash import BlockHash
from engine_adapter.engine.kv.kv_storage import KVStorage
from engine_adapter.engine.kv.prefix_cache import CachedBlock, PrefixCache
from engine_adapter.engine.kv.tiers.disk_writer import DiskWriter
from engine_adapter.engine.kv.tiers.host_tier import HostTier
from engine_adapter.engine.kv.tiers.tier_block import TierBlock, payload_checksum
from paged_kv.transfers import BlockTransfers, Event, Stream, on_stream

# Limit per step; the rest of a long chain follows with its next block.
MAX_STAGED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """Blocks being copied out of the device."""

    copied: Event
    chain: list[CachedBlock]
    first_depth: int
    rows: torch.Tensor


class TierStores:
    """All stores of one engine."""

    def __init__(
        self,
        *,
        host: HostTier | None,
        writer: DiskWriter | None,
        storage: KVStorage,
        cache: PrefixCache,
        transfers: BlockTransfers,
    ) -> None:
        self.num_host_stored = 0
        self._host = host
        self._writer = writer
        self._storage = storage
        self._cache = cache
        self._transfers = transfers
        self._staged: deque[_Staged] = deque()
        self._leaving: set[BlockHash] = set()  # of the staged blocks

    def store(self, entries: list[CachedBlock]) -> None:
        """Copy out what a step has cached and no tier has. Call after each step, before blocks are reused."""
        self.settle()
        if self._host is None and not self._can_write:
            return
        num_left = max(1, MAX_STAGED_BYTES // self._storage.block_bytes)
        for chain in _split_into_chains(entries):
            missing, first_depth = self._missing_of(chain)
            missing = missing[:num_left]
            if missing:
                num_left -= len(missing)
                self._copy_out(missing, first_depth)
        self.settle()

    def drop(self) -> None:
        """Forget the copies in progress."""
        self._staged.clear()
        self._leaving.clear()

    def _missing_of(self, chain: list[CachedBlock]) -> tuple[list[CachedBlock], int]:
        """Return the blocks of a chain, ancestors included, that no tier has, and the depth of the first."""
        ancestors: list[CachedBlock] = []
        parent = self._cache.parent_of(chain[0])
        while parent is not None:
            ancestors.append(parent)
            parent = self._cache.parent_of(parent)
        missing = list(takewhile(lambda entry: not self._is_kept(entry.block_hash), ancestors))
        whole = [*reversed(missing), *chain]
        num_kept = len(list(takewhile(lambda entry: self._is_kept(entry.block_hash), whole)))
        return whole[num_kept:], len(ancestors) - len(missing) + num_kept

    @property
    def _can_write(self) -> bool:
        return self._writer is not None and self._writer.has_room

    def _is_kept(self, block_hash: BlockHash) -> bool:
        """Return whether the lowest tier that accepts blocks now has this one or is getting it."""
        if block_hash in self._leaving:
            return True
        if self._writer is not None and self._writer.has_room:
            return self._writer.knows(block_hash)
        return self._host is not None and self._host.get(block_hash) is not None

    def _copy_out(self, chain: list[CachedBlock], first_depth: int) -> None:
        """Queue a copy of the blocks into staging memory."""
        block_ids: list[int] = [entry.block_id for entry in chain]
        rows = self._storage.allocate_rows(len(chain))

        def copy_out(stream: Stream) -> None:
            with on_stream(stream):
                self._storage.read_blocks(block_ids, rows)

        copied = self._transfers.store(block_ids, copy_out)
        self._leaving.update(entry.block_hash for entry in chain)
        self._staged.append(_Staged(copied=copied, chain=chain, first_depth=first_depth, rows=rows))

    def settle(self) -> None:
        """Pass the completed copies to the tiers."""
        while self._staged and self._staged[0].copied.query():
            staged = self._staged.popleft()
            rows = staged.rows.numpy()
            chain = [
                TierBlock(
                    block_hash=entry.block_hash,
                    parent_hash=entry.parent_hash,
                    token_bytes=entry.token_bytes,
                    depth=staged.first_depth + index,
                    checksum=payload_checksum(row.data),
                )
                for index, (entry, row) in enumerate(zip(staged.chain, rows, strict=True))
            ]
            if self._host is not None:
                self.num_host_stored += self._host.put(chain, rows)
            if self._writer is not None:
                self._writer.offer(chain, rows)
            self._leaving.difference_update(block.block_hash for block in chain)


def _split_into_chains(entries: list[CachedBlock]) -> Iterator[list[CachedBlock]]:
    """Split a step's blocks into runs in which each block follows the one before."""
    chain: list[CachedBlock] = []
    for entry in entries:
        if chain and entry.parent_hash != chain[-1].block_hash:
            yield chain
            chain = []
        chain.append(entry)
    if chain:
        yield chain
