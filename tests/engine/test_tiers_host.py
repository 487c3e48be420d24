"""The host tier against a dictionary, and the order in which it forgets."""

from __future__ import annotations

import pytest
from engine.tier_chains import BLOCK_BYTES, Rows, chain_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine_adapter.engine.kv.block_hash import BlockHash
from engine_adapter.engine.kv.tiers.host_tier import HostTier
from engine_adapter.engine.kv.tiers.tier_block import TierBlock

NUM_SLOTS = 6


def host_tier(num_slots: int = NUM_SLOTS) -> HostTier:
    return HostTier(max_bytes=num_slots * BLOCK_BYTES + 10, block_bytes=BLOCK_BYTES)


class HostTierMachine(RuleBasedStateMachine):
    """Whatever is put, used and discarded: the tier never holds more than it may, nor anything wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = host_tier()
        self.known: dict[BlockHash, tuple[TierBlock, bytes]] = {}
        self.seed = 0

    def put(self, chain: list[TierBlock], rows: Rows) -> int:
        num_kept = self.tier.put(chain, rows)
        for block, row in zip(chain, rows, strict=True):
            self.known[block.block_hash] = (block, row.tobytes())
        for block in chain[:num_kept]:
            assert self.tier.get(block.block_hash) == block
        return num_kept

    @rule(length=st.integers(1, NUM_SLOTS + 3))
    def put_a_new_chain(self, length: int) -> None:
        """A new chain is kept from its head as far as the tier is large."""
        self.seed += 1
        assert self.put(*chain_of(self.seed, length)) == min(length, NUM_SLOTS)

    @rule(choice=st.integers(0, 1000), length=st.integers(1, 4))
    def continue_a_chain(self, choice: int, length: int) -> None:
        """A continuation is kept only behind a parent that is there, and never at its ancestors' cost."""
        if not self.known:
            return
        parent = list(self.known.values())[choice % len(self.known)][0]
        self.seed += 1
        is_parent_there = self.tier.get(parent.block_hash) is not None
        num_kept = self.put(*chain_of(self.seed, length, parent))
        assert (num_kept > 0) <= is_parent_there
        assert (self.tier.get(parent.block_hash) is not None) == is_parent_there

    @rule(choice=st.integers(0, 1000))
    def use_or_discard(self, choice: int) -> None:
        """A discarded block is gone; a use changes no content."""
        if not self.known:
            return
        name = list(self.known)[choice % len(self.known)]
        if choice % 3:
            self.tier.use(name)
        else:
            self.tier.discard(name)
            assert self.tier.get(name) is None
            assert self.tier.row(name) is None

    @invariant()
    def what_is_there_is_right(self) -> None:
        """Every block held has the bytes it was put with, and the bound holds."""
        assert len(self.tier) <= NUM_SLOTS
        for name, (block, data) in self.known.items():
            row = self.tier.row(name)
            assert (row is None) == (self.tier.get(name) is None)
            if row is not None:
                assert self.tier.get(name) == block
                assert row.tobytes() == data


HostTierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestHostTier = HostTierMachine.TestCase


def test_a_chain_is_forgotten_from_its_tail() -> None:
    """With room for one more block, the tail of the older chain goes, never its head."""
    tier = host_tier()
    old, old_rows = chain_of(1, 4)
    tier.put(old, old_rows)
    new, new_rows = chain_of(2, 4)
    tier.put(new, new_rows)
    assert [tier.get(block.block_hash) is not None for block in old] == [True, True, False, False]
    assert all(tier.get(block.block_hash) for block in new)
    tier.use(old[1].block_hash)
    tier.put(*chain_of(3, 2))
    assert [tier.get(block.block_hash) is not None for block in old] == [True, True, False, False]
    assert [tier.get(block.block_hash) is not None for block in new] == [True, True, False, False]
    assert tier.num_evictions == 4
    assert tier.clear() == len(new[:2]) + len(old[:2]) + 2


def test_a_tier_too_small_for_a_block_is_refused() -> None:
    """The message gives both sizes."""
    with pytest.raises(ValueError, match="63 bytes cannot hold a KV block of 64"):
        HostTier(max_bytes=63, block_bytes=64)
