"""States, counts and reuse order of blocks, by example and against a plain model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged_kv.block_pool import BlockId, BlockPool, OutOfBlocks


def test_counts_add_up_through_a_blocks_life() -> None:
    """free → used → cached → pinned → cached → free, one gauge at a time."""
    pool = BlockPool(2)
    block_id = pool.allocate()
    assert (pool.counts().free, pool.counts().used) == (1, 1)
    pool.release(block_id, keep_content=True)
    assert (pool.counts().free, pool.counts().cached) == (1, 1)
    pool.pin(block_id)
    assert (pool.counts().free, pool.counts().pinned) == (1, 1)
    pool.unpin(block_id)
    pool.discard(block_id)
    assert pool.counts().free == 2


def test_free_blocks_go_before_cached_ones_and_cached_ones_by_age() -> None:
    """Content is destroyed only when nothing free is left, least recently used first."""
    pool = BlockPool(3)
    first, second, third = (pool.allocate() for _ in range(3))
    pool.release(second, keep_content=True)
    pool.release(first, keep_content=True)
    pool.release(third, keep_content=False)
    assert [pool.allocate() for _ in range(3)] == [third, second, first]
    with pytest.raises(OutOfBlocks):
        pool.allocate()


def test_a_hit_renews_a_blocks_age() -> None:
    """Acquiring and releasing a cached block puts it last in line."""
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.release(first, keep_content=True)
    pool.release(second, keep_content=True)
    pool.acquire(first)
    pool.release(first, keep_content=True)
    assert pool.cached_in_eviction_order() == [second, first]


def test_pinned_blocks_are_never_handed_out() -> None:
    """With everything pinned, allocation fails instead of destroying a pin."""
    pool = BlockPool(1)
    block_id = pool.allocate()
    pool.pin(block_id)
    pool.release(block_id, keep_content=True)
    assert pool.num_available == 0
    with pytest.raises(OutOfBlocks):
        pool.allocate()


def test_pins_are_counts() -> None:
    """A block pinned twice and unpinned once is still pinned."""
    pool = BlockPool(1)
    block_id = pool.allocate()
    pool.pin(block_id)
    pool.pin(block_id)
    pool.release(block_id, keep_content=True)
    pool.unpin(block_id)
    assert pool.counts().pinned == 1
    pool.unpin(block_id)
    assert pool.counts().cached == 1


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.release(BlockId(0), keep_content=True),
        lambda pool: pool.unpin(BlockId(0)),
        lambda pool: pool.acquire(BlockId(0)),
        lambda pool: pool.pin(BlockId(0)),
        lambda pool: pool.discard(BlockId(0)),
    ],
)
def test_misuse_of_a_free_block_fails_at_once(misuse: Callable[[BlockPool], None]) -> None:
    """A hold that was never taken cannot be given back, and nothing can be shared where nothing is."""
    with pytest.raises(AssertionError):
        misuse(BlockPool(1))


def test_a_pool_without_blocks_is_refused() -> None:
    """Zero blocks is a configuration error, not an empty pool."""
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)


def test_verify_notices_a_lost_and_an_extra_hold() -> None:
    """The integrity check compares with who really holds what."""
    pool = BlockPool(2)
    block_id = pool.allocate()
    pool.verify([block_id])
    with pytest.raises(AssertionError):
        pool.verify([])
    with pytest.raises(AssertionError):
        pool.verify([block_id, block_id])
    with pytest.raises(AssertionError):
        pool.verify([block_id], pinned=[block_id])


class PoolAgainstModel(RuleBasedStateMachine):
    """The pool and a model that only keeps lists of holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(5)
        self.held: list[BlockId] = []
        self.pinned: list[BlockId] = []
        self.cached: list[BlockId] = []  # eviction order

    def idle(self, block_id: BlockId) -> bool:
        return block_id not in self.held and block_id not in self.pinned

    def hit(self, block_id: BlockId) -> None:
        if block_id in self.cached:
            self.cached.remove(block_id)

    @rule()
    def allocate(self) -> None:
        free = [i for i in range(5) if self.idle(BlockId(i)) and i not in self.cached]
        if not free and not self.cached:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate()
            return
        block_id = self.pool.allocate()
        if free:
            assert block_id in free
        else:
            assert block_id == self.cached.pop(0)
        self.held.append(block_id)

    @precondition(lambda self: self.held or self.pinned or self.cached)
    @rule(data=st.data(), with_pin=st.booleans())
    def hold(self, data: st.DataObject, with_pin: bool) -> None:
        block_id = data.draw(st.sampled_from(sorted({*self.held, *self.pinned, *self.cached})))
        self.hit(block_id)
        (self.pool.pin if with_pin else self.pool.acquire)(block_id)
        (self.pinned if with_pin else self.held).append(block_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        block_id = data.draw(st.sampled_from(sorted(set(self.held))))
        self.pool.release(block_id, keep_content=keep)
        self.held.remove(block_id)
        if keep and self.idle(block_id):
            self.cached.append(block_id)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(set(self.pinned))))
        self.pool.unpin(block_id)
        self.pinned.remove(block_id)
        if self.idle(block_id):
            self.cached.append(block_id)

    @rule(index=st.integers(0, 4))
    def touch(self, index: int) -> None:
        self.pool.touch(BlockId(index))
        if index in self.cached:
            self.hit(BlockId(index))
            self.cached.append(BlockId(index))

    @invariant()
    def agrees(self) -> None:
        self.pool.verify(self.held, self.pinned)
        assert self.pool.cached_in_eviction_order() == self.cached
        counts = self.pool.counts()
        assert counts.pinned == len(set(self.pinned))
        assert counts.used == len(set(self.held) - set(self.pinned))
        assert counts.total == 5


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.__doc__ = "Any sequence of operations leaves pool and model in agreement."
