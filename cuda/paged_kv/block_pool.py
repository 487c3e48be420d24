"""Tracks which KV blocks are free, cached, used or pinned, and decides which one is allocated next.

The pool counts holders and orders the idle blocks; it never looks into a block. Every block is in exactly
one of four states, so the four gauges always add up to the total:

    free     no holder, no useful content
    cached   no holder, content may be reused: reclaimable, least recently used first
    used     held by at least one sequence
    pinned   held by a pin (and perhaps by sequences): never reclaimed

`allocate` takes free blocks first, then the least recently used cached one, which its owner (the prefix
cache) must then forget. All operations are O(1). It does not know tokens, hashes or memory addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of one block in the KV arena, the same in every layer."""


class OutOfBlocks(Exception):
    """Every block is used or pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Number of blocks in each state at one moment."""

    free: int
    cached: int
    used: int
    pinned: int

    @property
    def total(self) -> int:
        return self.free + self.cached + self.used + self.pinned


class BlockPool:
    """Reference counts and reuse order of `num_blocks` blocks."""

    def __init__(
        self,
        num_blocks: int,
        *,
        on_taken: Iterable[Callable[[BlockId], None]] = (),
        on_freed: Iterable[Callable[[BlockId], None]] = (),
    ) -> None:
        """Make a pool of free blocks.

        Args:
            on_taken: called with each allocated block, before `allocate` returns it.
            on_freed: called with each block that becomes free.
        """
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_cnt = [0] * num_blocks
        self._pin_cnt = [0] * num_blocks
        # Insertion order is reuse order. A dict removes from the front and from the middle in O(1).
        self._free: dict[BlockId, None] = {BlockId(i): None for i in range(num_blocks)}
        self._cached: dict[BlockId, None] = {}
        self._num_pinned = 0
        self._on_taken = tuple(on_taken)
        self._on_freed = tuple(on_freed)

    def __repr__(self) -> str:
        now = self.counts()
        states = f"{now.free} free, {now.cached} cached, {now.used} used, {now.pinned} pinned"
        return f"<BlockPool {self.num_blocks} blocks: {states}>"

    @property
    def num_available(self) -> int:
        """How many blocks `allocate` could return now."""
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        """Return the gauges; they add up to `num_blocks` by construction."""
        idle = len(self._free) + len(self._cached)
        return BlockCounts(
            free=len(self._free),
            cached=len(self._cached),
            used=self.num_blocks - self._num_pinned - idle,
            pinned=self._num_pinned,
        )

    def ref_cnt(self, block_id: BlockId) -> int:
        return self._ref_cnt[block_id]

    def pin_cnt(self, block_id: BlockId) -> int:
        return self._pin_cnt[block_id]

    def is_cached(self, block_id: BlockId) -> bool:
        return block_id in self._cached

    def cached_in_eviction_order(self) -> list[BlockId]:
        """Cached blocks, the next victim first."""
        return list(self._cached)

    def allocate(self) -> BlockId:
        """Return a block with one holder. If it was cached, its content is lost and its index must forget it.

        Raises:
            OutOfBlocks: nothing is free or cached.
        """
        queue = self._free or self._cached
        if not queue:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are used or pinned")
        block_id = next(iter(queue))
        del queue[block_id]
        self._ref_cnt[block_id] = 1
        for call in self._on_taken:
            call(block_id)
        return block_id

    def acquire(self, block_id: BlockId) -> None:
        """Add a holder to a block that is cached, used or pinned."""
        assert block_id not in self._free, f"block {block_id} is free and has nothing to share"
        self._cached.pop(block_id, None)
        self._ref_cnt[block_id] += 1

    def release(self, block_id: BlockId, *, keep_content: bool) -> None:
        """Remove a holder; after the last one the block is cached (most recent) or free."""
        assert self._ref_cnt[block_id] > 0, f"block {block_id} released more often than acquired"
        self._ref_cnt[block_id] -= 1
        self._park_if_idle(block_id, keep_content=keep_content)

    def touch(self, block_id: BlockId) -> None:
        """Make a cached block the most recent one. Does nothing in another state."""
        if block_id in self._cached:
            del self._cached[block_id]
            self._cached[block_id] = None

    def discard(self, block_id: BlockId) -> None:
        """Turn a cached block into a free one, because its content is no longer valid."""
        assert block_id in self._cached, f"block {block_id} is not cached"
        del self._cached[block_id]
        self._add_free(block_id)

    def pin(self, block_id: BlockId) -> None:
        """Add a pin to a block with content. Pins are counted: each needs its own `unpin`."""
        assert block_id not in self._free, f"block {block_id} is free: nothing there to pin"
        self._cached.pop(block_id, None)
        self._pin_cnt[block_id] += 1
        self._num_pinned += self._pin_cnt[block_id] == 1

    def unpin(self, block_id: BlockId, *, keep_content: bool = True) -> None:
        assert self._pin_cnt[block_id] > 0, f"block {block_id} unpinned more often than pinned"
        self._pin_cnt[block_id] -= 1
        self._num_pinned -= self._pin_cnt[block_id] == 0
        self._park_if_idle(block_id, keep_content=keep_content)

    def _park_if_idle(self, block_id: BlockId, *, keep_content: bool) -> None:
        if self._ref_cnt[block_id] or self._pin_cnt[block_id]:
            return
        if keep_content:
            self._cached[block_id] = None
        else:
            self._add_free(block_id)

    def _add_free(self, block_id: BlockId) -> None:
        self._free[block_id] = None
        for call in self._on_freed:
            call(block_id)

    def verify(self, held: Iterable[BlockId] = (), pinned: Iterable[BlockId] = ()) -> None:
        """Assert that the counts match the given holders and that idle blocks are in one queue. O(n)."""
        expected_refs = _count(held)
        expected_pins = _count(pinned)
        for index in range(self.num_blocks):
            block_id = BlockId(index)
            refs, pins = self._ref_cnt[index], self._pin_cnt[index]
            assert refs == expected_refs.get(block_id, 0), f"block {index}: {refs} refs, not its holders"
            assert pins == expected_pins.get(block_id, 0), f"block {index}: {pins} pins, not its pins"
            num_queues = (block_id in self._free) + (block_id in self._cached)
            assert num_queues == (0 if refs or pins else 1), f"block {index}: in {num_queues} idle queues"
        assert self.counts().total == self.num_blocks


def _count(block_ids: Iterable[BlockId]) -> dict[BlockId, int]:
    counts: dict[BlockId, int] = {}
    for block_id in block_ids:
        counts[block_id] = counts.get(block_id, 0) + 1
    return counts
