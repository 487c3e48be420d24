"""Threads that read and verify chunks of blocks from the disk.

At most MAX_CHUNKS_IN_FLIGHT are read at a time, for all sequences together, so staging memory is bounded. A
thread writes only into staging memory, never into a block, so a read can be abandoned at any time.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from engine_adapter.engine.kv.tiers.disk_tier import DiskPlace, DiskTier
from engine_adapter.engine.kv.tiers.tier_block import Tier, TierBlock

CHUNK_BYTES = 4 << 20  # large enough for a disk, small enough for a processor's cache
MAX_CHUNKS_IN_FLIGHT = 8
NUM_READERS = min(4, os.cpu_count() or 1)  # a disk needs a few reads at once; many would load the processor


@dataclass(slots=True, kw_only=True)
class Chunk:
    """Consecutive blocks of one tier."""

    tier: Tier
    blocks: list[TierBlock]
    places: list[DiskPlace] = field(default_factory=list)  # of the disk's blocks
    reading: Future[ReadChunk] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadChunk:
    """The result of a read."""

    rows: torch.Tensor  # (blocks, block_bytes) uint8 staging memory
    num_sound: int
    duration_s: float


class ChunkReaders:
    """The threads that read the disk tier."""

    def __init__(self, disk: DiskTier, allocate_rows: Callable[[int], torch.Tensor]) -> None:
        self._disk = disk
        self._allocate_rows = allocate_rows
        self._spare_rows: deque[torch.Tensor] = deque(maxlen=MAX_CHUNKS_IN_FLIGHT)
        self._threads = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="kv-disk-reader")
        self._running: set[Future[ReadChunk]] = set()

    @property
    def has_room(self) -> bool:
        self._running = {reading for reading in self._running if not reading.done()}
        return len(self._running) < MAX_CHUNKS_IN_FLIGHT

    def submit(self, chunk: Chunk) -> None:
        """Start reading a chunk from the disk."""
        chunk.reading = self._threads.submit(self._read, chunk.places)
        self._running.add(chunk.reading)

    def give_back(self, rows: torch.Tensor) -> None:
        """Reuse staging memory for a later chunk: allocating it costs more than reading into it."""
        self._spare_rows.append(rows)

    def wait_any(self, timeout_s: float) -> None:
        """Wait until one of the current reads has ended."""
        wait(self._running, timeout_s, FIRST_COMPLETED)

    def close(self) -> None:
        """Stop the threads without waiting for current reads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, places: list[DiskPlace]) -> ReadChunk:
        started_s = time.perf_counter()
        rows = self._staging(len(places))
        num_sound = self._disk.read(places, rows.numpy())
        return ReadChunk(rows=rows, num_sound=num_sound, duration_s=time.perf_counter() - started_s)

    def _staging(self, num_blocks: int) -> torch.Tensor:
        with suppress(IndexError):
            rows = self._spare_rows.pop()
            if len(rows) == num_blocks:
                return rows
        return self._allocate_rows(num_blocks)


def cut_into_chunks(found: list[tuple[TierBlock, DiskPlace | None]], block_bytes: int) -> deque[Chunk]:
    """Split found blocks into chunks: where the tier changes and where a chunk is full."""
    max_blocks = max(1, CHUNK_BYTES // block_bytes)
    chunks: deque[Chunk] = deque()
    for block, place in found:
        tier = Tier.HOST if place is None else Tier.DISK
        if not chunks or chunks[-1].tier is not tier or len(chunks[-1].blocks) == max_blocks:
            chunks.append(Chunk(tier=tier, blocks=[]))
        chunks[-1].blocks.append(block)
        if place is not None:
            chunks[-1].places.append(place)
    return chunks
