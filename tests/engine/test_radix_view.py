"""The cache drawn as a tree of prefixes, and the idle integrity check."""

from __future__ import annotations

import pytest
from engine.tiny_models import generate, tiny_engine

from engine_adapter.engine.kv.pins import PinSpec
from engine_adapter.engine.kv.radix_view import radix_view
from paged_kv.block_pool import BlockId


def test_shared_stem_and_its_branches_are_three_nodes() -> None:
    """Two prompts with a common system prompt: one stem, two branches, with sizes that add up."""
    engine = tiny_engine()
    stem = list(range(8))
    generate(engine, [*stem, 20, 21, 22, 23, 24, 25, 26, 27], 1)
    generate(engine, [*stem, 30, 31, 32, 33], 1)
    engine.pins.pin(PinSpec(token_ids=tuple(stem)))
    (root,) = radix_view(engine.blocks.prefix_cache, engine.blocks.pool)
    assert (root.num_blocks, root.num_blocks_below, root.num_pins, root.num_holders) == (2, 3, 1, 0)
    assert [child.num_blocks for child in root.children] == [2, 1]
    assert all(child.children == () and child.num_pins == 0 for child in root.children)


def test_view_is_bounded_and_says_what_it_left_off() -> None:
    """With a budget of nodes, the largest subtrees are drawn and the rest is counted."""
    engine = tiny_engine()
    for first in range(5):
        generate(engine, [first] * (4 + 4 * first) + [9], 1)
    roots = radix_view(engine.blocks.prefix_cache, engine.blocks.pool, max_nodes=2)
    assert [root.num_blocks for root in roots] == [5, 4]
    branching = tiny_engine()
    generate(branching, [1, 1, 1, 1, 2, 2, 2, 2, 3], 1)
    generate(branching, [1, 1, 1, 1, 4, 4, 4, 4, 3], 1)
    (root,) = radix_view(branching.blocks.prefix_cache, branching.blocks.pool, max_nodes=1)
    assert root.num_children_left_off == 2


def test_idle_check_counts_a_lost_block(caplog: pytest.LogCaptureFixture) -> None:
    """An unaccounted block is logged and counted when the engine is idle; the engine continues."""
    engine = tiny_engine()
    generate(engine, list(range(12)), 1)
    engine.tick()
    assert engine.stats().num_integrity_failures == 0
    engine.blocks.pool.acquire(BlockId(engine.blocks.pool.cached_in_eviction_order()[0]))
    engine.tick()
    assert engine.stats().num_integrity_failures == 1
    assert "block_accounting_broken" in caplog.text
    assert len(generate(engine, list(range(12)), 3)) == 3
