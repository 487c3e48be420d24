"""Explanations of misses, and residency under the gateway's tags."""

from __future__ import annotations

import random

from engine.tiny_models import generate, greedy_request, run_all, tiny_engine

from engine_adapter.engine.kv.explain import MissCause
from engine_adapter.engine.kv.inventory import TagInventory
from engine_adapter.engine.kv.prefix_cache import PrefixCache

BLOCK_SIZE = 4


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(97), k=length)


def test_never_seen_then_fully_cached() -> None:
    """Before anybody sent it a prompt is unknown; afterwards all that can be reused is there."""
    engine = tiny_engine()
    before = engine.explain(tokens(18))
    assert (before.cause, before.num_cached_tokens, before.first_missing_token) == (
        MissCause.NEVER_SEEN,
        0,
        0,
    )
    generate(engine, tokens(18), 1)
    after = engine.explain(tokens(18))
    assert (after.cause, after.num_cached_tokens, after.first_missing_token) == (MissCause.NONE, 16, None)


def test_difference_is_named_to_the_token() -> None:
    """If a prompt differs from a cached one inside a block, the position is reported."""
    engine = tiny_engine()
    cached = tokens(20)
    generate(engine, cached, 1)
    for position in (0, 5, 10, 15):
        changed = list(cached)
        changed[position] = (changed[position] + 1) % 97
        explanation = engine.explain(changed)
        assert explanation.cause is MissCause.DIFFERENT
        assert explanation.first_missing_token == position
        assert explanation.num_cached_tokens == position // BLOCK_SIZE * BLOCK_SIZE


def test_evicted_prefix_is_told_apart_from_unknown() -> None:
    """What was here and went under pressure is called evicted, with the moment."""
    engine = tiny_engine(num_kv_blocks=8)
    generate(engine, tokens(20), 1)
    generate(engine, tokens(28, seed=1), 1)
    explanation = engine.explain(tokens(20))
    assert explanation.cause is MissCause.EVICTED
    assert explanation.evicted_at_s is not None


def test_other_salt_is_named() -> None:
    """The same tokens under another salt are reported as such, and stay unused."""
    engine = tiny_engine()
    generate(engine, tokens(20), 1, cache_salt="a")
    explanation = engine.explain(tokens(20), cache_salt="b")
    assert (explanation.cause, explanation.num_cached_tokens) == (MissCause.OTHER_NAMESPACE, 0)


def test_short_prompts_and_empty_ones() -> None:
    """Less than a block and a token can never hit."""
    engine = tiny_engine()
    assert engine.explain(tokens(4)).cause is MissCause.TOO_SHORT
    assert engine.explain([]).cause is MissCause.TOO_SHORT


def test_explaining_changes_nothing() -> None:
    """No counter moves and no block changes its place in line."""
    engine = tiny_engine()
    generate(engine, tokens(20), 1)
    order, stats = engine.blocks.pool.cached_in_eviction_order(), engine.stats()
    engine.explain(tokens(20))
    assert (engine.blocks.pool.cached_in_eviction_order(), engine.stats()) == (order, stats)


def test_session_tag_follows_the_session() -> None:
    """A session's tag covers prompt and answer of its newest turn."""
    engine = tiny_engine()
    history = tokens(10)
    for turn in range(3):
        request = greedy_request("t", history, 6, session_tag="s:1")
        answer = [token for output in run_all(engine, [request])["t"] for token in output.new_token_ids]
        history = history + answer
        assert engine.inventory.resident_tokens("s:1") == (len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE
        history = history + tokens(5, seed=turn)


def test_group_tag_is_what_its_prompts_share() -> None:
    """Prompts of one group with different users leave the shared system prompt under the tag."""
    engine = tiny_engine()
    system = tokens(12)
    for user in range(3):
        prompt = system + tokens(9, seed=10 + user)
        run_all(engine, [greedy_request("r", prompt, 2, group_tag="g:1")])
    assert engine.inventory.resident_tokens("g:1") == 12
    assert engine.inventory.report() == {"g:1": 12}


def test_eviction_shows_in_the_inventory() -> None:
    """Residency is read from the cache at the moment of asking; eviction eats a prefix from its tail."""
    engine = tiny_engine(num_kv_blocks=8)
    run_all(engine, [greedy_request("r", tokens(20), 1, session_tag="s:1")])
    assert engine.inventory.resident_tokens("s:1") == 20
    generate(engine, tokens(28, seed=1), 1)
    assert engine.inventory.resident_tokens("s:1") == 4
    engine.clear_cache()
    assert engine.inventory.resident_tokens("s:1") == 0
    assert engine.inventory.report() == {}
    assert engine.inventory.resident_tokens("s:unknown") is None


def test_inventory_is_bounded_by_recency() -> None:
    """The least recently used tag is forgotten first; forgetting twice is harmless."""
    inventory = TagInventory(PrefixCache(), BLOCK_SIZE, max_tags=2)
    for tag in ("a", "b"):
        inventory.record_session(tag, [])
    inventory.record_session("a", [])
    inventory.record_session("c", [])
    assert inventory.resident_tokens("b") is None
    assert inventory.resident_tokens("a") == 0
    inventory.forget("a")
    inventory.forget("a")
    assert len(inventory) == 1
