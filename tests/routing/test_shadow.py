"""The shadow cache against a block-level LRU written the obvious way, and its own invariants."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.routing.shadow import Shadow
from gateway.values import Message

SIZES = st.integers(1, 4)


def chain_of(path: tuple[int, ...]) -> tuple[Message, ...]:
    """Messages named by their whole path; the size of a message is part of its name."""
    return tuple(
        Message(chain_hash=hash(path[: end + 1]), num_bytes=1 + path[end] % 3) for end in range(len(path))
    )


class BlockCache:
    """One entry per byte of prefix, oldest evicted first, a path touched from its end: as engines do it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: OrderedDict[tuple[int, int], None] = OrderedDict()

    @staticmethod
    def _blocks(chain: tuple[Message, ...]) -> list[tuple[int, int]]:
        return [(message.chain_hash, offset) for message in chain for offset in range(message.num_bytes)]

    def match(self, chain: tuple[Message, ...]) -> int:
        held = 0
        for block in self._blocks(chain):
            if block not in self.blocks:
                break
            held += 1
        return held

    def insert(self, chain: tuple[Message, ...]) -> None:
        for block in reversed(self._blocks(chain)):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=60), st.integers(8, 40))
def test_shadow_equals_a_block_level_lru(paths: list[list[int]], capacity: int) -> None:
    """Prompts match and are evicted exactly as in a cache of single blocks.

    Left out: a prompt that is the beginning of a longer cached one, where the shadow is coarser by design.
    """
    shadow, model = Shadow(10_000), BlockCache(capacity)
    shadow.set_capacity(0, capacity)
    for path in paths:
        chain = chain_of(tuple(path))
        assert shadow.cached_bytes(0, chain) == model.match(chain)
        if sum(message.num_bytes for message in chain) > capacity:
            continue  # an engine refuses a prompt larger than its cache
        if any(tuple(other[: len(path)]) == tuple(path) and len(other) > len(path) for other in paths):
            continue
        shadow.insert(0, chain)
        model.insert(chain)
        assert shadow.used_bytes(0) == len(model.blocks) <= capacity


class ShadowMachine(RuleBasedStateMachine):
    """Inserts, answers, restarts and capacity changes on three backends in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow = Shadow(12)
        self.paths: list[tuple[int, ...]] = [(0,)]
        for slot in range(3):
            self.shadow.set_capacity(slot, 20)

    @rule(slot=st.integers(0, 2), path=st.lists(st.integers(0, 2), min_size=1, max_size=9))
    def insert(self, slot: int, path: list[int]) -> None:
        self.paths.append(tuple(path))
        self.shadow.insert(slot, chain_of(tuple(path)))

    @rule(slot=st.integers(0, 2), index=st.integers(0, 1000), size=st.integers(0, 9))
    def answer(self, slot: int, index: int, size: int) -> None:
        self.shadow.add_answer(slot, chain_of(self.paths[index % len(self.paths)]), size)

    @rule(slot=st.integers(0, 2))
    def forget(self, slot: int) -> None:
        self.shadow.forget(slot)
        assert self.shadow.used_bytes(slot) == 0

    @rule(slot=st.integers(0, 2), capacity=st.integers(0, 40))
    def resize(self, slot: int, capacity: int) -> None:
        self.shadow.set_capacity(slot, capacity)

    @invariant()
    def levels_agree_with_single_queries(self) -> None:
        """`levels` names each holder once, longest first, with what `cached_bytes` says."""
        for path in self.paths[-5:]:
            chain = chain_of(path)
            found = [(slot, held) for slots, held in self.shadow.levels(chain) for slot in slots]
            single = {slot: held for slot in range(3) if (held := self.shadow.cached_bytes(slot, chain))}
            assert {slot: held for slot, held in found if held} == single
            assert len({slot for slot, _ in found}) == len(found)

    @invariant()
    def bounded(self) -> None:
        """No backend holds more lines than allowed, and sizes are never negative."""
        for slot in range(3):
            assert self.shadow.num_lines(slot) <= 12
            assert self.shadow.used_bytes(slot) >= 0
            assert bool(self.shadow.num_lines(slot)) or self.shadow.used_bytes(slot) == 0


TestShadowMachine = ShadowMachine.TestCase


def test_answer_counts_for_the_next_turn_only_as_far_as_it_is_repeated() -> None:
    """The generated answer is cached behind the prompt; the next message takes it over."""
    shadow = Shadow(100)
    shadow.set_capacity(0, 1000)
    first, following = chain_of((1, 2)), chain_of((1, 2, 2, 1))
    shadow.insert(0, first)
    shadow.add_answer(0, first, 2)
    base = sum(message.num_bytes for message in first)
    assert shadow.cached_bytes(0, following) == base + 2
    shadow.insert(0, following)
    assert shadow.used_bytes(0) == sum(message.num_bytes for message in following)


def test_dropped_text_that_returns_is_regretted() -> None:
    """Inserting what was evicted shortly before is reported, so that evictions get a price."""
    shadow = Shadow(100)
    shadow.set_capacity(0, 6)
    a, b = chain_of((2, 5)), chain_of((8, 11))
    shadow.insert(0, a)
    shadow.insert(0, b)  # pushes a out
    assert shadow.cached_bytes(0, a) == 0
    _, regretted = shadow.insert(0, a)
    assert regretted > 0


def test_many_holders_of_one_prompt_are_one_level() -> None:
    """A system prompt that twenty backends hold is one group; a deeper holder comes first and alone."""
    shadow = Shadow(100)
    for slot in range(20):
        shadow.set_capacity(slot, 1000)
        shadow.insert(slot, chain_of((7,)))
    shadow.insert(3, chain_of((7, 2, 2)))
    levels = shadow.levels(chain_of((7, 2, 2)))
    assert levels[0][0] == (3,)
    assert sorted(levels[1][0]) == [slot for slot in range(20) if slot != 3]


def test_colliding_hashes_never_break_the_tree() -> None:
    """Bad input (a hash twice in one chain, or under two prefixes) keeps sizes and queries sane."""
    shadow = Shadow(100)
    shadow.set_capacity(0, 50)
    odd = (
        Message(chain_hash=1, num_bytes=5),
        Message(chain_hash=2, num_bytes=5),
        Message(chain_hash=1, num_bytes=5),
    )
    other = (Message(chain_hash=9, num_bytes=5), Message(chain_hash=2, num_bytes=5))
    for _ in range(20):
        shadow.insert(0, odd)
        shadow.insert(0, other)
        shadow.levels(odd)
        assert 0 <= shadow.cached_bytes(0, other) <= 15
    shadow.set_capacity(0, 0)
    assert shadow.used_bytes(0) == 0
