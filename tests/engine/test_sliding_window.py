"""Blocks that a sliding window has passed: released, reused, evicted with what follows; never a wrong text.

All engines here run with the guards on: a freed block is NaN, so a layer that looked behind its window, mask
or no mask, would be seen in the text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine.test_engine_oracle import CASES as ALL_CASES
from engine.test_engine_oracle import COMMON, NUM_OUTPUT_TOKENS, prompt_with, random_tokens
from engine.test_model_families import FAMILIES, reference_model
from engine.test_tiers_engine import EagerPlanner
from engine.tiny_models import TINY, engine_like, generate, greedy_request, run_all, tiny_engine, tokens_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.kv.pins import PinRefused, PinSpec
from engine_adapter.engine.kv.sequence import EngineRequest
from engine_adapter.engine.kv.tiers.tier_config import TierConfig
from engine_adapter.engine.model.sampling import SamplingParams

WINDOW = 6
BLOCK_SIZE = 4
WINDOWED = dataclasses.replace(TINY, model_type="mistral", sliding_window=WINDOW)
LONGEST = 3 * NUM_OUTPUT_TOKENS
CASES = ALL_CASES[::2]


def windowed_engine(**settings: Any) -> LLMEngine:
    return tiny_engine(WINDOWED, **{"debug_kv_guards": True, **settings})


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int], list[int]]:
    """The answers of an engine that caches nothing and keeps every block, case by case."""
    engine = tiny_engine(WINDOWED, enable_prefix_caching=False)
    engine.blocks._reach_tokens = None
    return {case: generate(engine, prompt_with(*case), LONGEST) for case in CASES}


def num_held(engine: LLMEngine) -> int:
    return sum(len(sequence.held_blocks) for sequence in engine.scheduler.running)


def most_held(engine: LLMEngine, prompt: list[int], max_tokens: int) -> int:
    """Run one request and return the most blocks that it held while it decoded."""
    engine.add_request(greedy_request("r", prompt, max_tokens))
    most = 0
    while engine.has_work:
        outputs = engine.step()
        most = max(most, num_held(engine)) if outputs else most
    engine.tick()
    return most


# -- what is held


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_decode_holds_its_window_and_no_more(enable_prefix_caching: bool) -> None:
    """However long it runs, a sequence holds the blocks of the window and the one it writes."""
    engine = windowed_engine(enable_prefix_caching=enable_prefix_caching)
    assert most_held(engine, COMMON, 60) <= -(-WINDOW // BLOCK_SIZE) + 1
    counts = engine.stats()
    assert (counts.num_blocks_cached > 20) == enable_prefix_caching
    assert counts.num_integrity_failures == 0


def test_one_full_layer_keeps_every_block() -> None:
    """If any layer has full attention, no block is released."""
    mixed = dataclasses.replace(WINDOWED, full_attention_layers=frozenset({1}))
    assert mixed.reach_tokens is None
    engine = tiny_engine(mixed, debug_kv_guards=True)
    assert most_held(engine, COMMON, 60) == (len(COMMON) + 59) // BLOCK_SIZE + 1


def test_two_that_do_not_fit_as_a_whole_run_side_by_side() -> None:
    """Two sequences whose contexts together exceed the pool need no preemption, for their windows fit."""
    prompts = {name: random_tokens(seed, 8) for seed, name in enumerate("ab")}
    engine = windowed_engine(num_kv_blocks=16)
    outputs = run_all(engine, [greedy_request(name, prompt, 50) for name, prompt in prompts.items()])
    assert engine.stats().num_preemptions == 0
    plain = tiny_engine(WINDOWED, enable_prefix_caching=False)
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == generate(plain, prompt, 50)
    engine.verify()


def test_the_next_turn_finds_what_was_let_go() -> None:
    """Without pressure a windowed session reuses all of its history, far beyond the window."""
    engine = windowed_engine()
    answer = generate(engine, COMMON, 20)
    history = [*COMMON, *answer]
    request = greedy_request("next", [*history, 3, 4, 5], 4)
    output = run_all(engine, [request])["next"][-1]
    assert output.num_cached_tokens == (len(history) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert output.num_cached_tokens > 9 * WINDOW


# -- what is evicted


def test_pressure_takes_the_deepest_block_first_and_forgets_what_follows() -> None:
    """One block taken from behind a running sequence: its head stays findable, its held tail does not."""
    engine = windowed_engine(num_kv_blocks=14)
    engine.add_request(greedy_request("long", COMMON[:37], 20))
    engine.step()
    (sequence,) = engine.scheduler.running
    num_passed = sequence.num_released_blocks
    cached = [engine.blocks.prefix_cache.entry_of(block) for block in sequence.block_table]
    pool = engine.blocks.pool
    taken = [engine.blocks._allocate() for _ in range(len(pool._free) + 1)]  # one more than is free
    assert [
        entry is not None and entry.block_hash in engine.blocks.prefix_cache for entry in cached[:num_passed]
    ] == [True] * (num_passed - 1) + [False]
    assert engine.blocks.prefix_cache.entry_of(sequence.held_blocks[0]) is None
    for block_id in taken:
        pool.release(block_id, keep_content=False)
    engine.verify()
    while engine.has_work:
        engine.step()
        engine.verify()
    engine.tick()
    assert engine.stats().num_integrity_failures == 0
    assert engine.stats().num_blocks_cached == num_passed - 1


def test_forgotten_blocks_are_reported_as_removed() -> None:
    """Who listens to the cache hears of every block that can no longer be found, held ones included."""
    known: set[bytes] = set()

    class Listener:
        def record(self, removed: list, stored: list) -> None:
            known.difference_update(entry.block_hash for entry in removed)
            known.update(entry.block_hash for entry in stored)

    engine = windowed_engine(num_kv_blocks=14, max_num_sequences=4)
    engine._observer = Listener()
    for seed in range(12):
        engine.add_request(greedy_request(f"r{seed}", random_tokens(seed % 5, 14 + seed), 25))
    while engine.has_work:
        engine.step()
        assert known == {entry.block_hash for entry in engine.blocks.prefix_cache}


# -- what is answered


def test_cold_warm_and_evicted_equal_an_engine_that_lets_go_of_nothing(
    expected: dict[tuple[int, int], list[int]],
) -> None:
    """Every residue × shared prefix on a pool that evicts all the time, with hits beyond the window."""
    engine = windowed_engine(num_kv_blocks=14, max_batch_tokens=13, max_num_sequences=4)
    beyond = 0
    for case in CASES:
        generate(engine, COMMON, NUM_OUTPUT_TOKENS)
        output = run_all(engine, [greedy_request("r", prompt_with(*case), LONGEST)])["r"]
        assert tokens_of(output) == expected[case]
        beyond += output[-1].num_cached_tokens > WINDOW
        engine.verify()
        engine.tick()
    assert beyond > 5
    assert engine.stats().num_evictions > 100
    assert engine.stats().num_integrity_failures == 0


@pytest.mark.parametrize("host_bytes", [0, 1 << 16])
def test_batched_and_preempted_equal_an_engine_that_lets_go_of_nothing(
    expected: dict[tuple[int, int], list[int]], host_bytes: int
) -> None:
    """All cases at once on nine blocks, each preempted now and then, with a host tier and without."""
    engine = windowed_engine(num_kv_blocks=9, max_num_sequences=8, tiers=TierConfig(host_bytes=host_bytes))
    engine.tiers.loads.planner = EagerPlanner()
    for case in CASES:
        engine.add_request(greedy_request(f"{case}", prompt_with(*case), LONGEST))
    texts: dict[str, list[int]] = {f"{case}": [] for case in CASES}
    num_steps = 0
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.new_token_ids
        num_steps += 1
        if num_steps % 7 == 0 and engine.scheduler.running:
            engine.scheduler._preempt(engine.scheduler.running[-1])
    assert texts == {f"{case}": expected[case] for case in CASES}
    assert engine.stats().num_preemptions > 10
    assert not host_bytes or engine.stats().tiers["host"].num_hit_tokens > 0
    engine.tick()
    assert engine.stats().num_integrity_failures == 0


@pytest.mark.parametrize("family", ["mistral_window", "qwen2_all_windowed"])
def test_tokens_equal_those_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold, and with hits that begin and end beyond the window, in a pool that the whole would not fit."""
    all_windowed = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
    monkeypatch.setitem(FAMILIES, "qwen2_all_windowed", ("Qwen2Config", all_windowed))
    reference = reference_model(family)
    engine = engine_like(reference, num_kv_blocks=30, debug_kv_guards=True)
    assert engine.model_config.reach_tokens in (7, 9)
    prompt = [token % reference.config.vocab_size for token in random_tokens(4, 50)]
    for cached in (0, 48):
        sampling = SamplingParams(temperature=0.0, max_tokens=30, num_logprobs=3)
        request = EngineRequest(request_id="r", prompt_token_ids=prompt, sampling=sampling)
        outputs = run_all(engine, [request])["r"]
        assert outputs[-1].num_cached_tokens == cached
        text = tokens_of(outputs)
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits, dim=-1)
        assert text == logits.argmax(dim=-1).tolist()
        got = [entry.logprob for output in outputs for entry in output.logprobs if entry is not None]
        torch.testing.assert_close(
            torch.tensor(got), logprobs.gather(1, torch.tensor(text)[:, None])[:, 0], rtol=1e-4, atol=2e-4
        )


# -- in any order


class WindowsPinsAndTiers(RuleBasedStateMachine):
    """Requests of a windowed model, aborts, pins, clears and a host tier on a tiny guarded pool."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = windowed_engine(
            num_kv_blocks=11,
            max_batch_tokens=14,
            max_num_sequences=3,
            tiers=TierConfig(host_bytes=1 << 14),
        )
        self.engine.tiers.loads.planner = EagerPlanner()
        self.open: dict[str, None] = {}
        self.num_added = 0

    @rule(
        seed=st.integers(0, 2),
        length=st.integers(1, 30),
        output=st.integers(1, 12),
        priority=st.integers(0, 1),
    )
    def add(self, seed: int, length: int, output: int, priority: int) -> None:
        name = f"r{self.num_added}"
        self.num_added += 1
        self.engine.add_request(
            greedy_request(name, random_tokens(seed, 30)[:length], output, priority=priority)
        )
        self.open[name] = None

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.engine.step():
                if output.finish_reason is not None:
                    self.open.pop(output.request_id)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.open)))
        assert self.engine.abort(name)
        del self.open[name]

    @rule(seed=st.integers(0, 2), blocks=st.integers(1, 5))
    def pin(self, seed: int, blocks: int) -> None:
        try:
            self.engine.pins.pin(PinSpec(token_ids=tuple(random_tokens(seed, 30)[: blocks * BLOCK_SIZE])))
        except PinRefused:
            assert self.engine.pins.table.pins

    @precondition(lambda self: len(self.engine.pins.table) > 0)
    @rule()
    def unpin(self) -> None:
        assert self.engine.pins.unpin(self.engine.pins.table.pins[0].pin_id)

    @rule()
    def clear_device(self) -> None:
        self.engine.blocks.clear_cache()

    @invariant()
    def everything_adds_up(self) -> None:
        self.engine.verify()
        for entry in self.engine.blocks.prefix_cache:
            is_first = entry.parent_hash == self.engine.namespace()
            assert is_first or self.engine.blocks.prefix_cache.parent_of(entry) is not None
        assert self.engine._guard is not None
        self.engine._guard.check_all()

    def teardown(self) -> None:
        """What was asked ends in bounded time, holds nothing, and the cache's texts are right."""
        for _ in range(60 * (len(self.open) + 2)):
            if not self.engine.has_work:
                break
            self.engine.step()
        assert not self.engine.has_work
        assert self.engine.stats().num_blocks_used == 0
        for seed, text in enumerate(self.texts()):
            assert generate(self.engine, random_tokens(seed, 30)[:21], 6) == text
        self.engine.close()

    @staticmethod
    def texts() -> Iterator[list[int]]:
        """What an engine without any of this answers; computed once."""
        if not ANSWERS:
            plain = tiny_engine(WINDOWED, enable_prefix_caching=False)
            ANSWERS.extend(generate(plain, random_tokens(seed, 30)[:21], 6) for seed in range(3))
        yield from ANSWERS


ANSWERS: list[list[int]] = []
TestWindowsPinsAndTiers = WindowsPinsAndTiers.TestCase
TestWindowsPinsAndTiers.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
TestWindowsPinsAndTiers.__doc__ = "No order of windowed requests, pins, loads and aborts breaks a rule."
