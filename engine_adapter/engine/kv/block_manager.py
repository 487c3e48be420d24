"""Allocates blocks to sequences and decides which of them may be reused.

`admit` holds the matched prefix and allocates the rest, or changes nothing. So the count of computed tokens
never outlives the blocks it stands for.

A block enters the prefix cache only after the KV of its last token has been written (`commit`, after the
step). If the same content is already cached, because two sequences computed it side by side, the later copy
is released and the table points to the first. Hence there are no twins, and the parent of a cached block is
cached too and held by every sequence that holds the child. Blocks are released deepest first, so eviction
takes prefixes from their end.

If every layer has a sliding window, a running sequence releases the blocks that the window has passed; they
stay cached like those of a finished sequence. If one of them is evicted while the sequence still holds later
blocks, those can no longer be found: everything that continues an evicted block leaves the cache with it,
and a block that is still held stays with its sequence, uncached.

Cached blocks are never written again, and only whole blocks are shared.

It does not know torch or the scheduling policy.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_adapter.engine.kv.block_hash import (
    TOKEN_BYTES,
    BlockHash,
    block_hash,
    chain_hashes,
    encode_tokens,
)
from engine_adapter.engine.kv.eviction_log import EvictionLog
from engine_adapter.engine.kv.prefix_cache import CachedBlock, PrefixCache
from engine_adapter.engine.kv.sequence import Sequence
from paged_kv.block_pool import BlockId, BlockPool


class BlockManager:
    """Block tables over one pool and one prefix cache."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        reach_tokens: int | None = None,
    ) -> None:
        """Manage an unused pool.

        Args:
            reach_tokens: how many tokens, itself included, a token attends to at most; None: all.
        """
        self.pool = pool
        self.block_size = block_size
        self.prefix_cache = PrefixCache()
        self.eviction_log = EvictionLog()
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._enable_prefix_caching = enable_prefix_caching
        self._reach_tokens = reach_tokens
        self.block_bytes = block_size * TOKEN_BYTES
        # Hashes of blocks that admitted sequences are going to compute, with the number of sequences.
        self._awaited: dict[BlockHash, int] = {}

    def __repr__(self) -> str:
        hit_tokens = f"{self.num_hit_tokens} of {self.num_queried_tokens} tokens hit"
        return f"<BlockManager {self.pool!r}, {len(self.prefix_cache)} in the prefix cache, {hit_tokens}>"

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, sequence: Sequence) -> list[BlockId]:
        """Return the cached blocks that this sequence can start from. Changes only its list of hashes.

        The last token is always computed, because its logits are needed: a prompt of exactly n full blocks
        reuses at most n - 1 of them.
        """
        if not self._enable_prefix_caching:
            return []
        self._extend_hashes(sequence)
        if sequence.scores_prompt:  # every position's logits are needed
            return []
        num_reusable = (sequence.num_tokens - 1) // self.block_size
        return self.prefix_cache.longest_prefix(
            sequence.namespace,
            sequence.block_hashes[:num_reusable],
            encode_tokens(sequence.token_ids[: num_reusable * self.block_size]),
            self.block_bytes,
        )

    def waits_for_another(self, sequence: Sequence, num_matched: int) -> bool:
        """Whether another sequence is computing the first block that did not match."""
        if sequence.scores_prompt:
            return False
        hashes = sequence.block_hashes
        num_reusable = min(len(hashes), (sequence.num_tokens - 1) // self.block_size)
        return num_matched < num_reusable and hashes[num_matched] in self._awaited

    def admit(self, sequence: Sequence, matched: list[BlockId], *, num_spare: int = 0) -> bool:
        """Hold the matched blocks and allocate the others for all tokens, or change nothing.

        Args:
            matched: the result of `match_prefix`; pool and cache must not have changed since.
            num_spare: blocks that must stay available, so that running sequences can grow.
        """
        assert not sequence.block_table, "admitted twice"
        num_new = self.num_blocks_for(sequence.num_tokens) - len(matched)
        num_idle = sum(self.pool.is_cached(block_id) for block_id in matched)  # available until held
        if num_new + num_spare + num_idle > self.pool.num_available:
            return False
        for block_id in matched:
            self.pool.acquire(block_id)
        sequence.block_table = [*matched, *(self._allocate() for _ in range(num_new))]
        sequence.num_computed_tokens = len(matched) * self.block_size
        sequence.num_committed_blocks = len(matched)
        self._record_admission(sequence, len(matched))
        return True

    def _record_admission(self, sequence: Sequence, num_matched: int) -> None:
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.num_queried_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += sequence.num_cached_tokens
        if self._enable_prefix_caching:
            sequence.num_awaited_blocks = len(sequence.block_hashes)
            for awaited in sequence.block_hashes[num_matched:]:
                self._awaited[awaited] = self._awaited.get(awaited, 0) + 1

    def count_loaded(self, sequence: Sequence, tier: str, num_tokens: int) -> None:
        """Count tokens that a tier delivered after the first admission: they are a hit like any other."""
        if sequence.num_preemptions == 0:
            assert sequence.num_cached_tokens is not None, "loaded before it was admitted"
            sequence.num_cached_tokens += num_tokens
            self.num_hit_tokens += num_tokens
            sequence.num_loaded_tokens[tier] = sequence.num_loaded_tokens.get(tier, 0) + num_tokens

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend the block table to `num_tokens` tokens, or change nothing and return False."""
        num_new = self.num_blocks_for(num_tokens) - len(sequence.block_table)
        if num_new > self.pool.num_available:
            return False
        sequence.block_table.extend(self._allocate() for _ in range(num_new))
        return True

    def commit(self, sequence: Sequence) -> list[CachedBlock]:
        """Cache every block whose tokens are all computed; return the entries that are new to the cache.

        Changes: releases the blocks that the sliding window has passed.
        """
        stored: list[CachedBlock] = []
        num_full = sequence.num_computed_tokens // self.block_size
        if self._enable_prefix_caching and not sequence.is_private:
            self._extend_hashes(sequence)
            for index in range(sequence.num_committed_blocks, num_full):
                if not self._cache_block(sequence, index, stored):
                    sequence.is_private = True
                    break
            self._stop_awaiting(sequence, len(sequence.block_hashes) if sequence.is_private else num_full)
        sequence.num_committed_blocks = max(num_full, sequence.num_committed_blocks)
        self._release_passed(sequence)
        return stored

    def _cache_block(self, sequence: Sequence, index: int, stored: list[CachedBlock]) -> bool:
        """Cache one full block, or switch to its twin in the cache; return False if it cannot be cached.

        Changes: appends to `stored` what is new to the cache.
        """
        if index and self.prefix_cache.entry_of(sequence.block_table[index - 1]) is None:
            return False  # its parent left the cache: no lookup could reach it
        entry = self._entry_of(sequence, index)
        cached_id = self.prefix_cache.insert(entry)
        if cached_id is None:
            return False  # its hash belongs to other tokens: nothing after it may be cached either
        if cached_id == entry.block_id:
            stored.append(entry)
        else:
            self.pool.acquire(cached_id)
            self.pool.release(entry.block_id, keep_content=False)
            sequence.block_table[index] = cached_id
        return True

    def _release_passed(self, sequence: Sequence) -> None:
        """Release the blocks that the window of the next token has passed, except the last full one.

        That one is kept, however short the window, because the next block's hash depends on it.
        """
        if self._reach_tokens is None:
            return
        num_computed = sequence.num_computed_tokens
        num_passed = (num_computed + 1 - self._reach_tokens) // self.block_size
        num_passed = min(num_passed, num_computed // self.block_size - 1)
        if num_passed > sequence.num_released_blocks:
            self._release(sequence, sequence.num_released_blocks, num_passed)
            sequence.num_released_blocks = num_passed

    def _release(self, sequence: Sequence, start: int, end: int) -> None:
        """Release blocks of the table, deepest first; idle blocks before them are moved later in the queue.

        O(blocks before `end`) if a window has released some earlier, else O(end - start).
        """
        released = sequence.block_table[start:end]
        if not released:
            return
        entry = self.prefix_cache.entry_of(released[0])
        for block_id in reversed(released):
            self.pool.release(block_id, keep_content=self.prefix_cache.entry_of(block_id) is not None)
        while entry is not None and (entry := self.prefix_cache.parent_of(entry)) is not None:
            self.pool.touch(entry.block_id)

    def free(self, sequence: Sequence) -> None:
        """Release all blocks; cached ones stay cached, the deepest first in eviction order."""
        self._stop_awaiting(sequence, len(sequence.block_hashes))
        self._release(sequence, sequence.num_released_blocks, len(sequence.block_table))
        sequence.block_table = []
        sequence.num_released_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.num_committed_blocks = 0
        sequence.is_private = False
        sequence.load_id = None

    def clear_cache(self) -> int:
        """Forget every cached block that has no holder; return their number. Held blocks stay cached."""
        victims = self.pool.cached_in_eviction_order()
        for block_id in victims:  # children come before their parents, so each is still cached
            self._forget(block_id)
            self.pool.discard(block_id)
        return len(victims)

    def _allocate(self) -> BlockId:
        block_id = self.pool.allocate()
        self._forget(block_id)
        return block_id

    def _forget(self, block_id: BlockId) -> None:
        """Forget a block and everything that continues it; only a sliding window leaves such blocks."""
        forgotten = [self.prefix_cache.entry_of(block_id)]
        while forgotten:
            entry = forgotten.pop()
            if entry is None:
                continue
            forgotten.extend(self.prefix_cache.children_of(entry.block_hash))
            self.prefix_cache.remove(entry.block_id)
            self.eviction_log.record(entry)
            if entry.block_id != block_id and self.pool.is_cached(entry.block_id):
                self.pool.discard(entry.block_id)

    def _stop_awaiting(self, sequence: Sequence, end: int) -> None:
        """Withdraw the announced blocks from the first uncommitted one up to `end`."""
        for index in range(sequence.num_committed_blocks, min(end, sequence.num_awaited_blocks)):
            awaited = sequence.block_hashes[index]
            remaining = self._awaited.pop(awaited) - 1
            if remaining:
                self._awaited[awaited] = remaining
        if end >= sequence.num_awaited_blocks:
            sequence.num_awaited_blocks = 0

    def _extend_hashes(self, sequence: Sequence) -> None:
        """Hash the full blocks of `token_ids` that have no hash yet. O(new tokens)."""
        num_hashed = len(sequence.block_hashes)
        if num_hashed == 0:
            sequence.block_hashes = chain_hashes(sequence.namespace, sequence.token_ids, self.block_size)
            return
        for index in range(num_hashed, sequence.num_tokens // self.block_size):
            parent = sequence.block_hashes[index - 1]
            sequence.block_hashes.append(block_hash(parent, self.token_bytes(sequence, index)))

    def _entry_of(self, sequence: Sequence, index: int) -> CachedBlock:
        return CachedBlock(
            block_hash=sequence.block_hashes[index],
            parent_hash=sequence.block_hashes[index - 1] if index else sequence.namespace,
            token_bytes=self.token_bytes(sequence, index),
            block_id=sequence.block_table[index],
        )

    def token_bytes(self, sequence: Sequence, index: int) -> bytes:
        """Return the encoded tokens of one of a sequence's full blocks."""
        start = index * self.block_size
        return encode_tokens(sequence.token_ids[start : start + self.block_size])

    def verify(self, sequences: list[Sequence], pinned: Iterable[BlockId] = ()) -> None:
        """Assert that pool, cache and block tables agree. O(blocks): for tests and an idle engine."""
        held = [block_id for sequence in sequences for block_id in sequence.held_blocks]
        self.pool.verify(held, pinned)
        self.prefix_cache.verify()
        order = {block_id: i for i, block_id in enumerate(self.pool.cached_in_eviction_order())}
        for entry in self.prefix_cache:
            parent = self.prefix_cache.parent_of(entry)
            idle_since = order.get(entry.block_id)
            if parent is None or parent.block_id not in order:
                continue
            if idle_since is None:
                assert self._reach_tokens is not None, "a held block's parent is idle"
            else:
                assert idle_since < order[parent.block_id], "a parent would be evicted before its child"
        for block_id in order:
            assert self.prefix_cache.entry_of(block_id) is not None, f"block {block_id} cached, not indexed"
        awaited = sum(
            max(0, sequence.num_awaited_blocks - sequence.num_committed_blocks) for sequence in sequences
        )
        assert sum(self._awaited.values()) == awaited, "awaited hashes do not match the sequences"
