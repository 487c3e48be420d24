"""One segment file of the disk tier: its format, how it is written, and what is trusted when it is read.

    0          header, 4096 bytes: magic, version, shape, root of the model, checksum of these
    4096       entries, one per slot: hash, parent, depth, payload checksum, tokens, checksum of these
    aligned    payloads, one per slot: the block's bytes as on the device
    to 4096

All numbers are little-endian. Slots are filled in order and never rewritten. A payload is written before its
entry, so a slot without a valid entry was never finished: torn writes are ignored. Nothing is synced until
the file is full or closed: a killed process loses nothing (the kernel has the bytes), a power failure may
lose recent blocks, which the checksums detect.

Entries are stored together, so a restart needs one read per segment and reads no payloads. The file
descriptor is closed with its last reference, so readers can continue while the file is removed.
"""

from __future__ import annotations

import os
import struct
import weakref
from dataclasses import dataclass
from pathlib import Path

import xxhash

from engine_adapter.engine.kv.block_hash import BlockHash
from engine_adapter.engine.kv.tiers.tier_block import Row, TierBlock

FORMAT_VERSION = 1
MAGIC = b"HOMINGKV"
PAGE_BYTES = 4096
_HEADER = struct.Struct("<8sIIQQ32s")  # magic, version, slots, block bytes, token bytes, root
_ENTRY = struct.Struct("<32s32sIQ")  # hash, parent, depth, payload checksum; tokens and a checksum follow
_CHECKSUM = struct.Struct("<Q")


class SegmentUnusable(Exception):
    """The file is not a segment of this model; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentShape:
    """The sizes and the model that all segments of one worker share."""

    root: BlockHash  # names model, dtypes and block size
    block_bytes: int
    token_bytes: int  # of the tokens of one block
    num_slots: int

    @property
    def entry_bytes(self) -> int:
        return _ENTRY.size + self.token_bytes + _CHECKSUM.size

    @property
    def payload_start(self) -> int:
        end = PAGE_BYTES + self.num_slots * self.entry_bytes
        return -(-end // PAGE_BYTES) * PAGE_BYTES

    @property
    def full_bytes(self) -> int:
        """Size of a full segment."""
        return self.payload_start + self.num_slots * self.block_bytes

    def header(self) -> bytes:
        body = _HEADER.pack(
            MAGIC, FORMAT_VERSION, self.num_slots, self.block_bytes, self.token_bytes, self.root
        )
        return (body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(PAGE_BYTES, b"\0")

    def entry(self, slot: int, block: TierBlock) -> bytes:
        body = _ENTRY.pack(block.block_hash, block.parent_hash, block.depth, block.checksum)
        return self._sealed(slot, body + block.token_bytes)

    def block_of(self, slot: int, entry: bytes) -> TierBlock | None:
        """Return the block of a valid entry, or None."""
        body = entry[: -_CHECKSUM.size]
        if entry != self._sealed(slot, body):
            return None
        block_hash, parent_hash, depth, checksum = _ENTRY.unpack_from(body)
        return TierBlock(
            block_hash=BlockHash(block_hash),
            parent_hash=BlockHash(parent_hash),
            token_bytes=body[_ENTRY.size :],
            depth=depth,
            checksum=checksum,
        )

    @staticmethod
    def _sealed(slot: int, body: bytes) -> bytes:
        # The slot is the seed, so that an entry in the wrong place is invalid too.
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body, seed=slot + 1))


class Segment:
    """An open segment file. `append` belongs to one thread; any thread may read."""

    def __init__(self, path: Path, number: int, shape: SegmentShape, file_descriptor: int) -> None:
        self.path = path
        self.number = number
        self.shape = shape
        self.num_used = 0
        self.used_at = 0  # number of its latest use; kept by the tier
        self._fd = file_descriptor
        weakref.finalize(self, os.close, file_descriptor)

    @classmethod
    def create(cls, path: Path, number: int, shape: SegmentShape) -> Segment:
        """Create an empty segment; raise OSError if that fails."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        segment = cls(path, number, shape, fd)
        try:
            _write_all(fd, shape.header(), 0)
        except OSError:
            path.unlink()
            raise
        return segment

    @classmethod
    def reopen(cls, path: Path, number: int, shape: SegmentShape) -> tuple[Segment, dict[int, TierBlock]]:
        """Open an existing segment; return it and its valid entries by slot.

        The number of slots comes from the file; everything else must match `shape`.

        Raises:
            SegmentUnusable: another format or model, or no header.
            OSError: it cannot be read.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        segment = cls(path, number, shape, fd)
        header = os.pread(fd, PAGE_BYTES, 0)
        if len(header) < _HEADER.size:
            raise SegmentUnusable("it has no header")
        num_slots = _HEADER.unpack_from(header)[2]
        segment.shape = SegmentShape(
            root=shape.root,
            block_bytes=shape.block_bytes,
            token_bytes=shape.token_bytes,
            num_slots=num_slots,
        )
        if header != segment.shape.header():
            raise SegmentUnusable("it was written for another model, by another version, or is damaged")
        return segment, segment._read_entries()

    def _read_entries(self) -> dict[int, TierBlock]:
        """Return the valid entries. Changes: `num_used`, to one past the last slot with an entry."""
        shape = self.shape
        raw = os.pread(self._fd, shape.num_slots * shape.entry_bytes, PAGE_BYTES)
        present_bytes = os.fstat(self._fd).st_size - shape.payload_start
        blocks: dict[int, TierBlock] = {}
        for slot in range(len(raw) // shape.entry_bytes):
            entry = raw[slot * shape.entry_bytes : (slot + 1) * shape.entry_bytes]
            if not any(entry):
                continue
            self.num_used = slot + 1
            block = shape.block_of(slot, entry)
            if block is not None and present_bytes >= (slot + 1) * shape.block_bytes:
                blocks[slot] = block
        return blocks

    @property
    def is_full(self) -> bool:
        return self.num_used == self.shape.num_slots

    @property
    def num_bytes(self) -> int:
        return self.shape.payload_start + self.num_used * self.shape.block_bytes

    def append(self, block: TierBlock, row: Row) -> int:
        """Write one block into the next slot and return the slot. On OSError the slot stays free."""
        slot, shape = self.num_used, self.shape
        _write_all(self._fd, row.data, shape.payload_start + slot * shape.block_bytes)
        _write_all(self._fd, shape.entry(slot, block), PAGE_BYTES + slot * shape.entry_bytes)
        self.num_used += 1
        return slot

    def read(self, first_slot: int, rows: Row) -> int:
        """Read consecutive payloads into (blocks, block_bytes); return the number of bytes read."""
        return os.preadv(
            self._fd, [rows.data], self.shape.payload_start + first_slot * self.shape.block_bytes
        )

    def sync(self) -> None:
        """Wait until everything written is on the medium."""
        os.fdatasync(self._fd)

    def remove(self) -> None:
        """Delete the file; reads in progress can finish."""
        self.path.unlink(missing_ok=True)


def _write_all(file_descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(file_descriptor, view, offset)
        view, offset = view[written:], offset + written
