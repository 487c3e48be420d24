"""Writes blocks to the disk tier on its own thread, so that the engine's steps never wait for a disk.

The queue is bounded in bytes. When it is full, blocks are dropped and counted, and so is everything that
continues them, because a block is useless without its parent. When a write fails (disk full, quota, I/O
error), writing pauses for RETRY_S and blocks are dropped; requests are not affected.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from engine_adapter.engine.kv.block_hash import BlockHash
from engine_adapter.engine.kv.tiers.disk_tier import DiskTier
from engine_adapter.engine.kv.tiers.tier_block import Row, TierBlock

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 256 << 20
RETRY_S = 30.0


class DiskWriter:
    """A bounded queue in front of one disk tier. Only the engine's thread calls `offer`."""

    def __init__(
        self,
        tier: DiskTier,
        *,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_written = 0
        self.num_dropped = 0
        self.num_errors = 0
        self._tier = tier
        self._max_queued_bytes = max_queued_bytes
        self._clock = clock
        self._queue: deque[tuple[TierBlock, Row]] = deque()
        self._queued: set[BlockHash] = set()
        self._queued_bytes = 0
        self._paused_until_s = 0.0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kv-disk-writer", daemon=True)
        self._thread.start()

    def offer(self, chain: list[TierBlock], rows: Row) -> int:
        """Queue consecutive blocks; return how many leading ones are stored or queued."""
        with self._changed:
            num_taken = 0
            for block, row in zip(chain, rows, strict=True):
                if not self._takes(block, row.nbytes):
                    break
                num_taken += 1
                if block.block_hash not in self._queued and self._tier.find(block.block_hash) is None:
                    self._queue.append((block, row))
                    self._queued.add(block.block_hash)
                    self._queued_bytes += row.nbytes
            self.num_dropped += len(chain) - num_taken
            self._changed.notify_all()
        return num_taken

    @property
    def has_room(self) -> bool:
        """Whether `offer` would accept anything now."""
        return self._queued_bytes < self._max_queued_bytes and self._clock() >= self._paused_until_s

    def knows(self, block_hash: BlockHash) -> bool:
        """Return whether the block is stored or queued."""
        return block_hash in self._queued or self._tier.find(block_hash) is not None

    def flush(self, timeout_s: float) -> bool:
        """Wait until the queue is written; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queued, timeout_s)

    def clear(self) -> None:
        """Drop what is queued and delete what is written."""
        with self._changed:
            while self._queue:
                self._forget(*self._queue.pop())
            self._changed.wait_for(lambda: not self._queued)  # for the block being written
            self._tier.clear()

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued, then stop the thread and close the tier. Idempotent."""
        if self._is_closed:
            return
        if not self.flush(timeout_s):
            logger.warning("kv_disk_queue_lost", extra={"blocks": len(self._queued)})
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        self._tier.close()

    def _takes(self, block: TierBlock, num_bytes: int) -> bool:
        if not self.has_room or (block.depth and not self.knows(block.parent_hash)):
            return False
        return self._queued_bytes + num_bytes <= self._max_queued_bytes

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if self._is_closed:
                    return
                block, row = self._queue.popleft()
            is_written = self._write(block, row)
            with self._changed:
                self.num_written += is_written
                self._forget(block, row)
                self._changed.notify_all()

    def _forget(self, block: TierBlock, row: Row) -> None:
        self._queued.discard(block.block_hash)
        self._queued_bytes -= row.nbytes

    def _write(self, block: TierBlock, row: Row) -> bool:
        if self._clock() < self._paused_until_s:
            self.num_dropped += 1
            return False
        try:
            return self._tier.append(block, row)
        except OSError as error:
            self.num_errors += 1
            self._paused_until_s = self._clock() + RETRY_S
            logger.warning("kv_disk_write_failed", extra={"error": str(error), "retry_s": RETRY_S})
            return False
