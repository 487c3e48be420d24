"""A segment file: what was written is read back, and damage to any byte is detected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine.tier_chains import BLOCK_BYTES, SHAPE, append_all, chain_of, disk_tier, read_one

from engine_adapter.engine.kv.tiers.segment import PAGE_BYTES, Segment, SegmentShape, SegmentUnusable
from engine_adapter.engine.kv.tiers.tier_block import payload_checksum

CHAIN, ROWS = chain_of(1, 3)


def written(path: Path, num_blocks: int = 3) -> Segment:
    segment = Segment.create(path, 1, SHAPE)
    for block, row in zip(CHAIN[:num_blocks], ROWS, strict=False):
        segment.append(block, row)
    return segment


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    """Entries and payloads survive closing; the file is as large as the shape says and private."""
    path = tmp_path / "segment-00000001.kv"
    assert written(path).is_full
    segment, blocks = Segment.reopen(path, 1, SHAPE)
    assert list(blocks.values()) == CHAIN
    rows = np.empty((3, BLOCK_BYTES), np.uint8)
    assert segment.read(0, rows) == 3 * BLOCK_BYTES
    np.testing.assert_array_equal(rows, ROWS)
    assert path.stat().st_size == segment.num_bytes == SHAPE.full_bytes
    assert path.stat().st_mode & 0o077 == 0


def test_a_reopened_segment_goes_on_behind_its_last_slot(tmp_path: Path) -> None:
    """A half-filled file takes the next block into its next slot."""
    path = tmp_path / "segment-00000001.kv"
    written(path, 2)
    segment, _ = Segment.reopen(path, 1, SHAPE)
    assert segment.append(CHAIN[2], ROWS[2]) == 2
    assert list(Segment.reopen(path, 1, SHAPE)[1].values()) == CHAIN


def test_any_changed_byte_loses_at_most_what_it_belongs_to(tmp_path: Path) -> None:
    """Bytes of every field are changed in turn: a block read is right, and untouched ones are found."""
    tier = disk_tier(tmp_path)
    assert append_all(tier, CHAIN, ROWS) == 3
    tier.close()
    path = tmp_path / "segment-00000001.kv"
    whole = path.read_bytes()
    payload_start = len(whole) - 3 * BLOCK_BYTES
    first_entry = whole.find(CHAIN[0].block_hash, PAGE_BYTES)
    entry_bytes = whole.find(CHAIN[1].block_hash, PAGE_BYTES) - first_entry
    used = [
        *range(0, 96, 5),  # header
        *range(first_entry, first_entry + 3 * entry_bytes, 3),
        *range(payload_start, len(whole), 7),
        PAGE_BYTES - 1,
        payload_start - 1,
    ]
    for position in used:
        damaged = bytearray(whole)
        damaged[position] ^= 0x41
        path.write_bytes(damaged)
        tier = disk_tier(tmp_path)
        got = [read_one(tier, block) for block in CHAIN]
        tier.close()
        for data, row in zip(got, ROWS, strict=True):
            assert data in (None, row.tobytes()), f"wrong bytes after damage at {position}"
        if position >= payload_start:
            hit = (position - payload_start) // BLOCK_BYTES
            assert [data is None for data in got] == [index >= hit for index in range(3)]
        elif first_entry <= position < first_entry + 3 * entry_bytes:
            hit = (position - first_entry) // entry_bytes
            # What continues a lost block cannot be reached: it is not indexed either.
            assert [data is None for data in got] == [index >= hit for index in range(3)]
        path.unlink(missing_ok=True)


def test_a_file_cut_anywhere_loses_its_tail_only(tmp_path: Path) -> None:
    """A torn write, as a file that ends anywhere, costs the blocks that are not whole and no others."""
    tier = disk_tier(tmp_path)
    append_all(tier, CHAIN, ROWS)
    tier.close()
    path = tmp_path / "segment-00000001.kv"
    whole = path.read_bytes()
    payload_start = len(whole) - 3 * BLOCK_BYTES
    heads = [0, 7, 60, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 100]
    for length in [*heads, *range(payload_start, len(whole), 7)]:
        path.write_bytes(whole[:length])
        tier = disk_tier(tmp_path)
        num_whole = max(0, (length - payload_start) // BLOCK_BYTES)
        got = [read_one(tier, block) for block in CHAIN]
        assert got == [row.tobytes() if i < num_whole else None for i, row in enumerate(ROWS)], length
        # The space behind is used again, and what was lost can be stored again.
        assert append_all(tier, CHAIN, ROWS) == 3 - num_whole
        assert [read_one(tier, block) for block in CHAIN] == [row.tobytes() for row in ROWS]
        tier.close()
        for file in tmp_path.glob("segment-*.kv"):
            file.unlink()


def test_an_entry_in_the_wrong_slot_is_no_entry(tmp_path: Path) -> None:
    """Two entries swapped as a whole are refused although each is intact."""
    path = tmp_path / "segment-00000001.kv"
    written(path)
    data = bytearray(path.read_bytes())
    first, second = (
        slice(PAGE_BYTES + slot * SHAPE.entry_bytes, PAGE_BYTES + (slot + 1) * SHAPE.entry_bytes)
        for slot in (0, 1)
    )
    data[first], data[second] = data[second], data[first]
    path.write_bytes(data)
    assert set(Segment.reopen(path, 1, SHAPE)[1]) == {2}


@pytest.mark.parametrize(
    "other",
    [
        SegmentShape(root=CHAIN[0].block_hash, block_bytes=64, token_bytes=16, num_slots=3),
        SegmentShape(root=SHAPE.root, block_bytes=128, token_bytes=16, num_slots=3),
        SegmentShape(root=SHAPE.root, block_bytes=64, token_bytes=32, num_slots=3),
    ],
)
def test_a_segment_of_another_model_is_refused(tmp_path: Path, other: SegmentShape) -> None:
    """Another root, block size in bytes or in tokens: the file says so before any block is believed."""
    path = tmp_path / "segment-00000001.kv"
    written(path)
    with pytest.raises(SegmentUnusable, match="another model"):
        Segment.reopen(path, 1, other)


def test_a_removed_segment_can_still_be_read_by_who_holds_it(tmp_path: Path) -> None:
    """Eviction does not pull a file from under a reader."""
    path = tmp_path / "segment-00000001.kv"
    segment = written(path)
    segment.remove()
    assert not path.exists()
    rows = np.empty((1, BLOCK_BYTES), np.uint8)
    segment.read(1, rows)
    assert payload_checksum(rows[0].data) == CHAIN[1].checksum
