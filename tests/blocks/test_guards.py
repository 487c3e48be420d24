"""The debug mode: poison in free blocks, canaries in sealed ones."""

import pytest
import torch

from paged_kv.arena import KVArena
from paged_kv.backends.attention import AttentionBatch, make_backend
from paged_kv.guards import BlockCorrupted, BlockGuard
from paged_kv.layout import KVDtype, KVLayout

LAYOUT = KVLayout(
    num_layers=1, num_blocks=4, block_size=4, num_kv_heads=1, head_dim=8, dtype=KVDtype.FP8_E4M3
)


class Guarded:
    """A torch backend with a guard, and a sequence of one head."""

    def __init__(self) -> None:
        self.backend = make_backend("torch", KVArena.allocate(LAYOUT), num_heads=1, scale=1.0)
        self.guard = BlockGuard(self.backend, num_blocks=LAYOUT.num_blocks, block_bytes=LAYOUT.block_bytes)

    def batch(self, block_id: int, num_tokens: int) -> AttentionBatch:
        return AttentionBatch.build(
            query_lens=[num_tokens],
            context_lens=[num_tokens],
            block_tables=[[block_id]],
            block_size=LAYOUT.block_size,
        )

    def write(self, block_id: int, value: float = 1.0, num_tokens: int = 4) -> None:
        rows = torch.full((num_tokens, 1, 8), value)
        self.backend.write_kv(0, rows, rows, self.batch(block_id, num_tokens))


def test_a_block_lives_through_its_states() -> None:
    """Taken, written, sealed, checked, freed and taken again: nothing to report."""
    guarded = Guarded()
    for _ in range(2):
        guarded.guard.taken(2)
        guarded.write(2)
        guarded.guard.sealed(2)
        guarded.guard.check_all()
        guarded.guard.freed(2)
    guarded.guard.check_all()


def test_a_write_to_a_free_block_is_found_when_the_block_is_taken() -> None:
    """A late writer, such as a store of a block already given back, is named at the next allocation."""
    guarded = Guarded()
    guarded.write(3, num_tokens=1)
    guarded.guard.taken(2)
    with pytest.raises(BlockCorrupted, match="block 3 was written while it was free"):
        guarded.guard.taken(3)


def test_a_change_of_a_sealed_block_is_found() -> None:
    """The next check names a shared block that was written to."""
    guarded = Guarded()
    guarded.guard.taken(1)
    guarded.write(1)
    guarded.guard.sealed(1)
    guarded.write(1, value=2.0, num_tokens=1)
    with pytest.raises(BlockCorrupted, match="block 1 changed after it was sealed"):
        guarded.guard.check_all()


def test_a_free_block_cannot_be_sealed() -> None:
    """Sealing a free block is the caller's mistake."""
    with pytest.raises(BlockCorrupted, match="sealed while it was free"):
        Guarded().guard.sealed(0)


def test_reading_a_freed_block_gives_nan_and_never_old_text() -> None:
    """A block table that still names a freed block yields NaN in every output."""
    guarded = Guarded()
    guarded.guard.taken(1)
    guarded.write(1)
    guarded.guard.freed(1)
    batch = AttentionBatch.build(query_lens=[1], context_lens=[4], block_tables=[[1]], block_size=4)
    query = torch.ones(1, 1, 8)
    assert guarded.backend.attend(0, query, query, query, batch).isnan().all()
