"""Loads blocks from a tier into blocks that a sequence already holds.

A load begins after the sequence has been admitted with all its blocks, so it cannot run out of them half way.
Between steps the engine's thread installs the chunks that have arrived, in order, while other sequences
continue to compute. A load ends in `BlockManager.commit`, as computing does, so caching, twins and waiting
sequences follow the same rules. The host tier is asked before the disk; what the disk delivers is put into
the host tier too.

Invariants: what is installed is a prefix without a gap; a sequence that lost its blocks (`Sequence.load_id`
tells) gets nothing; the first block that is missing or damaged ends the load, and the rest is computed like
any other prompt. A disk that does not answer for LOAD_TIMEOUT_S ends it too.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

import torch

from engine_adapter.engine.kv.block_manager import BlockManager
from engine_adapter.engine.kv.kv_storage import KVStorage
from engine_adapter.engine.kv.prefix_cache import CachedBlock
from engine_adapter.engine.kv.sequence import Sequence
from engine_adapter.engine.kv.tiers.chunk_readers import Chunk, ChunkReaders, cut_into_chunks
from engine_adapter.engine.kv.tiers.disk_tier import DiskPlace, DiskTier
from engine_adapter.engine.kv.tiers.host_tier import HostTier
from engine_adapter.engine.kv.tiers.load_planner import LoadPlanner
from engine_adapter.engine.kv.tiers.tier_block import Tier, TierBlock, payload_checksum
from engine_adapter.engine.kv.tiers.tier_load import TierLoad
from paged_kv.transfers import BlockTransfers, Stream, on_stream

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 10.0
WAIT_S = 0.02  # an engine with nothing but loads to do looks for new requests this often


class TierLoads:
    """All loads of one engine. Single-threaded, like the engine."""

    def __init__(
        self,
        *,
        host: HostTier | None,
        disk: DiskTier | None,
        storage: KVStorage,
        blocks: BlockManager,
        transfers: BlockTransfers,
        clock: Callable[[], float],
    ) -> None:
        self.planner = LoadPlanner()
        self.hit_tokens: Counter[Tier] = Counter()
        self.loaded_bytes: Counter[Tier] = Counter()
        self.num_host_damaged = 0
        self.num_timeouts = 0
        self._host = host
        self._disk = disk
        self._storage = storage
        self._blocks = blocks
        self._transfers = transfers
        self._clock = clock
        self._readers = ChunkReaders(disk, storage.allocate_rows) if disk is not None else None
        self._loads: list[TierLoad] = []
        self._num_begun = 0

    @property
    def is_loading(self) -> bool:
        return bool(self._loads)

    def begin(self, sequence: Sequence) -> None:
        """Start loading what follows the sequence's cached blocks, if a tier has it and loading is faster.

        Changes: `sequence.load_id`; the sequence must not be computed until it is None again.
        """
        found = [] if sequence.scores_prompt else self._find_missing(sequence)
        if not found:
            return
        places = Counter(Tier.HOST if place is None else Tier.DISK for _, place in found)
        sizes = {tier: count * self._storage.block_bytes for tier, count in places.items()}
        if not self.planner.pays(len(found) * self._blocks.block_size, sizes):
            return
        self._mark_used(found)
        self._num_begun += 1
        sequence.load_id = self._num_begun
        load = TierLoad(
            load_id=self._num_begun,
            sequence=sequence,
            chunks=cut_into_chunks(found, self._storage.block_bytes),
            waiting_since_s=self._clock(),
        )
        self._loads.append(load)
        self._start_reads()

    def advance(self) -> list[CachedBlock]:
        """Install what has arrived; return what the prefix cache has gained. Call before each step."""
        stored: list[CachedBlock] = []
        for load in list(self._loads):
            self._advance(load, stored)
            if not load.is_wanted or not load.chunks:
                self._loads.remove(load)
                if load.is_wanted:
                    load.sequence.load_id = None
        self._start_reads()
        return stored

    def wait(self) -> None:
        """Sleep until a read has ended, at most WAIT_S. Call when there is nothing to compute."""
        if self._readers is not None:
            self._readers.wait_any(WAIT_S)

    def close(self) -> None:
        """Stop the readers. Idempotent."""
        if self._readers is not None:
            self._readers.close()

    def _find_missing(self, sequence: Sequence) -> list[tuple[TierBlock, DiskPlace | None]]:
        """Return the blocks in tiers that follow the sequence's cached ones; never its last token."""
        found: list[tuple[TierBlock, DiskPlace | None]] = []
        hashes, first = sequence.block_hashes, sequence.num_committed_blocks
        num_reusable = min(len(hashes), (sequence.num_tokens - 1) // self._blocks.block_size)
        for index in range(first, num_reusable):
            place = None
            block = self._host.get(hashes[index]) if self._host is not None else None
            if block is None and self._disk is not None:
                place = self._disk.find(hashes[index])
                block = place.block if place is not None else None
            parent_hash = hashes[index - 1] if index else sequence.namespace
            if block is None or not block.matches(parent_hash, self._blocks.token_bytes(sequence, index)):
                break
            found.append((block, place))
        return found

    def _mark_used(self, found: list[tuple[TierBlock, DiskPlace | None]]) -> None:
        """Keep both tiers from evicting what is about to be loaded."""
        if self._host is not None and (hosted := [block for block, place in found if place is None]):
            self._host.use(hosted[-1].block_hash)
        if self._disk is not None:
            self._disk.use(found[-1][0].block_hash)

    def _start_reads(self) -> None:
        """Submit chunks to the disk readers, oldest load first, while they have room."""
        if self._readers is None:
            return
        waiting = (
            chunk
            for load in self._loads
            for chunk in load.chunks
            if chunk.tier is Tier.DISK and chunk.reading is None
        )
        for chunk in waiting:
            if not self._readers.has_room:
                break
            self._readers.submit(chunk)

    def _advance(self, load: TierLoad, stored: list[CachedBlock]) -> None:
        """Install the chunks that have arrived, in order."""
        while load.is_wanted and load.chunks:
            rows = self._arrived_rows(load.chunks[0])
            if rows is None:
                if self._clock() - load.waiting_since_s > LOAD_TIMEOUT_S:
                    self._give_up(load)
                return
            chunk = load.chunks.popleft()
            if len(rows):
                stored.extend(self._install(load.sequence, chunk, rows))
                self._recycle(chunk)
            load.waiting_since_s = self._clock()
            if len(rows) < len(chunk.blocks):
                load.chunks.clear()

    def _recycle(self, chunk: Chunk) -> None:
        """Let the readers reuse a chunk's memory, unless a device may still be reading it."""
        if self._readers is not None and chunk.reading is not None and self._storage.is_host:
            self._readers.give_back(chunk.reading.result().rows)

    def _give_up(self, load: TierLoad) -> None:
        """End a load whose disk does not answer, and record the disk as slow."""
        self.num_timeouts += 1
        num_bytes = len(load.chunks[0].blocks) * self._storage.block_bytes
        self.planner.observe_timeout(Tier.DISK, num_bytes, LOAD_TIMEOUT_S)
        logger.warning("kv_tier_read_timed_out", extra={"timeout_s": LOAD_TIMEOUT_S})
        load.chunks.clear()

    def _arrived_rows(self, chunk: Chunk) -> torch.Tensor | None:
        """Return the intact leading rows of a chunk, or None while it is being read."""
        if chunk.tier is Tier.HOST:
            return self._host_rows(chunk)
        if chunk.reading is None or not chunk.reading.done():
            return None
        if (failure := chunk.reading.exception()) is not None:  # most likely out of memory: a miss
            logger.error("kv_tier_read_failed", extra={"error": repr(failure)})
            return self._storage.allocate_rows(0)
        read = chunk.reading.result()
        self.planner.observe_read(Tier.DISK, read.num_sound * self._storage.block_bytes, read.duration_s)
        return read.rows[: read.num_sound]

    def _host_rows(self, chunk: Chunk) -> torch.Tensor:
        """Copy a chunk out of the host tier, up to the first block that is missing or damaged."""
        assert self._host is not None
        started_s = time.perf_counter()
        rows = self._storage.allocate_rows(len(chunk.blocks))
        num_sound = 0
        for block, target in zip(chunk.blocks, rows.numpy(), strict=True):
            row = self._host.row(block.block_hash)
            if row is None:
                break
            target[:] = row
            if payload_checksum(target.data) != block.checksum:
                self.num_host_damaged += 1
                self._host.discard(block.block_hash)
                break
            num_sound += 1
        duration_s = time.perf_counter() - started_s
        self.planner.observe_read(Tier.HOST, num_sound * self._storage.block_bytes, duration_s)
        return rows[:num_sound]

    def _install(self, sequence: Sequence, chunk: Chunk, rows: torch.Tensor) -> list[CachedBlock]:
        """Write rows into the sequence's next blocks and commit them, as if they had been computed."""
        first = sequence.num_committed_blocks
        block_ids: list[int] = [*sequence.block_table[first : first + len(rows)]]

        def copy_in(stream: Stream, layer: int) -> None:
            del layer  # blocks are loaded whole, all layers at once
            with on_stream(stream):
                self._storage.write_blocks(block_ids, rows)

        self._transfers.load(block_ids, 1, copy_in).before_layer(0)
        num_loaded_tokens = len(rows) * self._blocks.block_size
        sequence.num_computed_tokens += num_loaded_tokens
        self._blocks.count_loaded(sequence, chunk.tier.value, num_loaded_tokens)
        self.hit_tokens[chunk.tier] += num_loaded_tokens
        self.loaded_bytes[chunk.tier] += len(rows) * self._storage.block_bytes
        if self._host is not None and chunk.tier is Tier.DISK:
            self._host.put(chunk.blocks[: len(rows)], rows.numpy())
        return self._blocks.commit(sequence)
