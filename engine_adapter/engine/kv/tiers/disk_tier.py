"""The disk tier: which block is in which segment file, and which file is deleted when space runs out.

A folder belongs to one process (enforced by a lock file) and to one model: segments of another model are
removed, because they would only take space. Space is limited by whole files: before a new one is created, the
least recently used are deleted. Using a block counts as using its ancestors, and of equally recent files the
newer is deleted first, so a file is never deleted before those that only continue its chains.

Invariant: the index holds all ancestors of every block in it. The index is kept in memory and rebuilt from
the files' entries at start, so it cannot disagree with them. The order of use before a restart is unknown;
age replaces it, with each block counted as used when the newest block that continues it was written.

Any thread may look up and read; one thread (`disk_writer`) appends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine_adapter.engine.kv.block_hash import BlockHash
from engine_adapter.engine.kv.tiers.segment import PAGE_BYTES, Segment, SegmentShape, SegmentUnusable
from engine_adapter.engine.kv.tiers.tier_block import Row, TierBlock, payload_checksum

logger = logging.getLogger(__name__)

MAX_SEGMENT_BYTES = 256 << 20
MIN_SEGMENTS = 32  # a segment, the unit of eviction, is at most this fraction of the space


class DiskTierUnusable(ValueError):
    """The folder cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskPlace:
    """Where a block is stored. Stays readable while referenced, even if its file is removed."""

    block: TierBlock
    segment: Segment
    slot: int


class DiskTier:
    """Hash → place in a segment file."""

    def __init__(
        self, folder: Path, *, max_bytes: int, block_bytes: int, token_bytes: int, root: BlockHash
    ) -> None:
        """Open the folder, creating it if necessary, and index its contents.

        Raises:
            DiskTierUnusable: locked by another process, not writable, or too small for two blocks.
        """
        self.folder = folder
        self.max_bytes = max_bytes
        self.num_evictions = 0
        self.num_damaged = 0  # entries lost to torn writes or other damage
        self._shape = _shape(max_bytes, block_bytes, token_bytes, root)
        self._index: dict[BlockHash, DiskPlace] = {}
        self._segments: dict[int, Segment] = {}
        self._active: Segment | None = None
        self._num_uses = 0
        self._mutex = threading.Lock()
        self._lock_fd = _lock(folder)
        try:
            self._reopen()
        except OSError as error:
            self.close()
            raise DiskTierUnusable(f"--kv-disk-path {folder} cannot be read: {error}") from error

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        with self._mutex:
            return sum(segment.num_bytes for segment in self._segments.values())

    def find(self, block_hash: BlockHash) -> DiskPlace | None:
        return self._index.get(block_hash)

    def use(self, block_hash: BlockHash) -> None:
        """Count a use of a block and its ancestors."""
        with self._mutex:
            self._num_uses += 1
            self._touch(block_hash)

    def read(self, places: Sequence[DiskPlace], rows: Row) -> int:
        """Read blocks into (len(places), block_bytes); return how many leading ones are intact.

        A damaged block is forgotten, so that it is computed and written again. Consecutive slots are read
        with one call.
        """
        start = 0
        while start < len(places):
            stop = _end_of_run(places, start)
            try:
                places[start].segment.read(places[start].slot, rows[start:stop])
            except OSError as error:
                logger.warning("kv_disk_unreadable", extra={"error": str(error)})
            for index in range(start, stop):
                if payload_checksum(rows[index].data) != places[index].block.checksum:
                    self._discard(places[index])
                    return index
            start = stop
        return len(places)

    def append(self, block: TierBlock, row: Row) -> bool:
        """Write one block; return False if it is already stored or its parent is not.

        Raises OSError if the disk is full or fails; then nothing is indexed.
        """
        with self._mutex:
            is_known = block.block_hash in self._index
            is_reachable = block.depth == 0 or block.parent_hash in self._index
        if is_known or not is_reachable:
            return False
        segment = self._segment_with_room(block.parent_hash)
        slot = segment.append(block, row)
        with self._mutex:
            if self._segments.get(segment.number) is not segment:
                return False  # cleared in the meantime
            self._index[block.block_hash] = DiskPlace(block=block, segment=segment, slot=slot)
            self._num_uses += 1
            segment.used_at = self._num_uses
            self._touch(block.parent_hash)
        if segment.is_full:
            segment.sync()
        return True

    def clear(self) -> int:
        """Delete every block; return their number."""
        with self._mutex:
            num_blocks = len(self._index)
            for segment in list(self._segments.values()):
                self._remove(segment)
        return num_blocks

    def close(self) -> None:
        """Sync the newest segment and unlock the folder. Idempotent; the tier must not be used afterwards."""
        if self._active is not None:
            self._active.sync()
            self._active = None
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _segment_with_room(self, parent_hash: BlockHash) -> Segment:
        """Return the active segment, or a new one after making room for it."""
        with self._mutex:
            if self._active is not None and not self._active.is_full:
                return self._active
            self._num_uses += 1
            self._touch(parent_hash)
            self._evict(self.max_bytes - self._shape.full_bytes)
            number = max(self._segments, default=0) + 1
            segment = Segment.create(self.folder / f"segment-{number:08d}.kv", number, self._shape)
            self._segments[number] = self._active = segment
            return segment

    def _evict(self, max_bytes: int) -> None:
        """Delete segments until the others take at most `max_bytes`."""
        while self._segments and sum(segment.num_bytes for segment in self._segments.values()) > max_bytes:
            victim = min(self._segments.values(), key=lambda segment: (segment.used_at, -segment.number))
            self.num_evictions += self._remove(victim)

    def _remove(self, segment: Segment) -> int:
        """Delete a segment and forget its blocks; return how many blocks were lost."""
        del self._segments[segment.number]
        if self._active is segment:
            self._active = None
        segment.remove()
        return self._forget(lambda place: place.segment is segment)

    def _forget(self, is_lost: Callable[[DiskPlace], bool]) -> int:
        """Forget blocks and everything that continues them; return how many. O(blocks of the tier).

        What continues a lost block could not be found; once forgotten, it is stored again with its parent.
        Parents come before children in the index, because a block is only added after its parent.
        """
        kept: dict[BlockHash, DiskPlace] = {}
        for name, place in self._index.items():
            is_reachable = place.block.depth == 0 or place.block.parent_hash in kept
            if is_reachable and not is_lost(place):
                kept[name] = place
        num_lost = len(self._index) - len(kept)
        self._index = kept
        return num_lost

    def _discard(self, damaged: DiskPlace) -> None:
        with self._mutex:
            self.num_damaged += 1
            self._forget(lambda place: place is damaged)

    def _touch(self, block_hash: BlockHash) -> None:
        """Mark the segments of a whole chain as used now. O(depth)."""
        while (place := self._index.get(block_hash)) is not None:
            place.segment.used_at = self._num_uses
            block_hash = place.block.parent_hash

    def _reopen(self) -> None:
        for path in sorted(self.folder.glob("segment-*.kv")):
            number = int(path.stem.partition("-")[2])
            try:
                segment, blocks = Segment.reopen(path, number, self._shape)
            except SegmentUnusable as reason:
                logger.warning("kv_segment_removed", extra={"path": str(path), "reason": str(reason)})
                path.unlink()
                continue
            segment.used_at = self._num_uses = number
            self._segments[number] = segment
            self.num_damaged += segment.num_used - len(blocks)
            for slot, block in blocks.items():
                # A block whose parent is missing (its file was deleted) can never be found.
                if block.depth == 0 or block.parent_hash in self._index:
                    self._index[block.block_hash] = DiskPlace(block=block, segment=segment, slot=slot)
            if not segment.is_full and segment.shape == self._shape:
                self._active = segment
        self._guess_order_of_use()
        self._evict(self.max_bytes)

    def _guess_order_of_use(self) -> None:
        """Mark each block as used when the newest block that continues it was written."""
        used_at: dict[BlockHash, int] = {}
        for name, place in reversed(self._index.items()):
            used_at[name] = max(used_at.get(name, 0), place.segment.number)
            place.segment.used_at = max(place.segment.used_at, used_at[name])
            parent = place.block.parent_hash
            used_at[parent] = max(used_at.get(parent, 0), used_at[name])


def _shape(max_bytes: int, block_bytes: int, token_bytes: int, root: BlockHash) -> SegmentShape:
    """Choose the size of a segment: large files, but several of them.

    Raises:
        DiskTierUnusable: two segments of one block do not fit.
    """
    target = min(MAX_SEGMENT_BYTES, max_bytes // MIN_SEGMENTS) - 2 * PAGE_BYTES
    one = SegmentShape(root=root, block_bytes=block_bytes, token_bytes=token_bytes, num_slots=1)
    shape = SegmentShape(
        root=root,
        block_bytes=block_bytes,
        token_bytes=token_bytes,
        num_slots=max(1, target // (block_bytes + one.entry_bytes)),
    )
    if 2 * shape.full_bytes > max_bytes:
        raise DiskTierUnusable(
            f"--kv-disk-bytes {max_bytes} is too small: a file with one block takes {shape.full_bytes} bytes"
        )
    return shape


def _lock(folder: Path) -> int | None:
    """Lock the folder for this process; the kernel releases the lock when the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DiskTierUnusable(f"--kv-disk-path {folder} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise DiskTierUnusable(
            f"--kv-disk-path {folder} is in use by process {owner or 'unknown'}: "
            "give each worker its own folder"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _end_of_run(places: Sequence[DiskPlace], start: int) -> int:
    """Return the end of the run of places from `start` that are consecutive in one file."""
    stop = start + 1
    while (
        stop < len(places)
        and places[stop].segment is places[start].segment
        and places[stop].slot == places[start].slot + stop - start
    ):
        stop += 1
    return stop
