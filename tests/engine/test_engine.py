"""The engine as the server sees it: outputs, gauges, aborts, faults, a thousand requests on a tiny pool."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from engine.tiny_models import TINY, generate, greedy_request, run_all, tiny_engine, tiny_loaded, tokens_of

from engine_adapter.engine.core.config import EngineConfig, fast_dtype
from engine_adapter.engine.core.llm_engine import LLMEngine, RequestRefused
from engine_adapter.engine.core.model_runner import ModelRunner
from engine_adapter.engine.kv.pins import PinSpec
from engine_adapter.engine.kv.prefix_cache import PrefixCache
from engine_adapter.engine.kv.sequence import EngineRequest, FinishReason
from engine_adapter.engine.kv.tiers.tier_config import TierConfig
from engine_adapter.engine.model.sampling import SamplingParams
from engine_adapter.engine.scheduling.scheduler import QueueFull


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(97), k=length)


def assert_gauges_add_up(engine: LLMEngine) -> None:
    stats = engine.stats()
    parts = (stats.num_blocks_free, stats.num_blocks_cached, stats.num_blocks_used, stats.num_blocks_pinned)
    assert sum(parts) == stats.num_blocks_total
    assert 0 <= stats.kv_usage <= 1


def test_cached_and_computed_add_up_to_the_prompt() -> None:
    """Cold reports zero, warm reports full blocks and at most all but one token."""
    engine = tiny_engine()
    for expected in (0, 16):
        outputs = run_all(engine, [greedy_request("r", tokens(17), 3)])["r"]
        assert [output.num_cached_tokens for output in outputs] == [expected] * 3
        assert outputs[-1].num_prompt_tokens == 17
        assert [output.num_output_tokens for output in outputs] == [1, 2, 3]
    stats = engine.stats()
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (34, 16)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (34, 6)


def test_live_blocks_are_zero_when_idle_however_full_the_cache() -> None:
    """Hundreds of prompts, cold then warm: cached grows, live returns to zero, nothing leaks."""
    engine = tiny_engine(num_kv_blocks=220)
    for seed in range(100):
        generate(engine, tokens(9, seed), 1)
        assert_gauges_add_up(engine)
    stats = engine.stats()
    assert (stats.num_blocks_used, stats.num_blocks_cached) == (0, 200)
    for seed in range(60, 100):
        assert run_all(engine, [greedy_request("r", tokens(9, seed), 1)])["r"][0].num_cached_tokens == 8
    assert engine.stats().num_evictions == stats.num_evictions
    engine.verify()


def test_finish_reasons() -> None:
    """A stop token ends with stop and is delivered; the token limit and the context end with length."""
    engine = tiny_engine(max_model_len=32)
    text = generate(engine, tokens(8), 6)
    stop = SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=frozenset({text[2]}))
    outputs = run_all(engine, [EngineRequest(request_id="r", prompt_token_ids=tokens(8), sampling=stop)])["r"]
    assert tokens_of(outputs) == text[: text.index(text[2]) + 1]
    assert outputs[-1].finish_reason is FinishReason.STOP
    outputs = run_all(engine, [greedy_request("r", tokens(8), 6)])["r"]
    assert [output.finish_reason for output in outputs] == [None] * 5 + [FinishReason.LENGTH]
    unlimited = SamplingParams(temperature=0.0)
    outputs = run_all(
        engine, [EngineRequest(request_id="r", prompt_token_ids=tokens(8), sampling=unlimited)]
    )["r"]
    assert len(tokens_of(outputs)) == 24
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "word"), [([], "empty"), ([1] * 32, "at most 31"), ([97], "outside"), ([-1], "outside")]
)
def test_impossible_requests_are_refused_at_once(prompt: list[int], word: str) -> None:
    """What can never run raises, names the limit, and leaves nothing behind."""
    engine = tiny_engine(max_model_len=32)
    with pytest.raises(RequestRefused, match=word):
        engine.add_request(greedy_request("r", prompt))
    assert not engine.has_work


def test_request_ids_are_unique_while_in_use() -> None:
    """A second request under a live id is refused; after the end the id is free again."""
    engine = tiny_engine()
    engine.add_request(greedy_request("r", [1, 2]))
    with pytest.raises(RequestRefused, match="in use"):
        engine.add_request(greedy_request("r", [3, 4]))
    assert engine.abort("r")
    assert not engine.abort("r")
    engine.add_request(greedy_request("r", [3, 4]))


def test_full_queue_leaves_no_trace() -> None:
    """A request refused by the queue can be sent again under its id."""
    engine = tiny_engine(max_num_waiting=1)
    engine.add_request(greedy_request("a", [1]))
    with pytest.raises(QueueFull):
        engine.add_request(greedy_request("b", [2]))
    engine.step()
    engine.add_request(greedy_request("b", [2]))


def test_timings_follow_the_engines_clock() -> None:
    """Queue, first token and last token are moments of the injected clock, in order."""
    ticks: Iterator[float] = iter(range(1000))
    config = EngineConfig(dtype="fp32", block_size=4, num_kv_blocks=16)
    engine = LLMEngine(tiny_loaded(), config, clock=lambda: float(next(ticks)))
    timings = run_all(engine, [greedy_request("r", tokens(5), 3)])["r"][-1].timings
    assert timings.first_scheduled_s is not None
    assert timings.first_token_s is not None
    assert timings.last_token_s is not None
    assert timings.arrival_s < timings.first_scheduled_s < timings.first_token_s < timings.last_token_s


def test_deadline_is_reported_as_timeout() -> None:
    """A request that waited past its deadline ends with a reason and no token."""
    now = [0.0]
    config = EngineConfig(dtype="fp32", block_size=4, num_kv_blocks=16, max_num_sequences=1)
    engine = LLMEngine(tiny_loaded(), config, clock=lambda: now[0])
    engine.add_request(greedy_request("running", [1, 2, 3], 20))
    engine.step()
    engine.add_request(greedy_request("late", [4, 5, 6], 20, deadline_s=5.0))
    now[0] = 5.0
    late = [output for output in engine.step() if output.request_id == "late"]
    assert [output.finish_reason for output in late] == [FinishReason.TIMEOUT]
    assert late[0].new_token_ids == []


def test_failing_step_ends_its_requests_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault at the n-th step: its requests report the error, the pool stays whole, the rest is served."""
    reference = generate(tiny_engine(), tokens(20), 5)
    for failing in range(6):
        engine = tiny_engine(max_num_sequences=2)
        engine._runner = cast(ModelRunner, RunnerThatFails(engine._runner, failing))
        requests = [greedy_request(f"r{i}", tokens(20, i % 2), 5) for i in range(5)]
        outputs = run_all(engine, requests)
        failed = [name for name, items in outputs.items() if items[-1].finish_reason is FinishReason.ERROR]
        assert 1 <= len(failed) <= 2
        assert all("no memory" in (outputs[name][-1].error or "") for name in failed)
        assert all(len(tokens_of(outputs[name])) == 5 for name in outputs if name not in failed)
        engine.verify()
        assert engine.stats().num_blocks_used == 0
        assert generate(engine, tokens(20), 5) == reference


class RunnerThatFails:
    """A runner whose n-th step writes KV and then raises."""

    def __init__(self, runner: ModelRunner, failing: int) -> None:
        self._runner, self._left = runner, failing

    def run(self, scheduled: list) -> list:
        self._left -= 1
        if self._left == -1:
            self._runner.run(scheduled)
            raise RuntimeError("no memory")
        return self._runner.run(scheduled)


def test_salts_share_nothing() -> None:
    """The same prompt under another salt is cold, and both answer alike."""
    engine = tiny_engine()
    texts = []
    for salt, cached in (("a", 0), ("b", 0), ("a", 16), ("", 0)):
        outputs = run_all(engine, [greedy_request("r", tokens(17), 4, cache_salt=salt)])["r"]
        assert outputs[0].num_cached_tokens == cached
        texts.append(tokens_of(outputs))
    assert len({tuple(text) for text in texts}) == 1


def test_forced_hash_collisions_never_serve_foreign_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """With names cut to 4 bits nearly all collide; every text is still its own, misses are counted."""
    import engine_adapter.engine.kv.block_hash as naming
    import engine_adapter.engine.kv.block_manager as manager

    def weak(parent: bytes, token_bytes: bytes) -> bytes:
        return bytes([hashlib.sha256(parent + token_bytes).digest()[0] & 15]) * 32

    expected = {
        seed: generate(tiny_engine(enable_prefix_caching=False), tokens(18, seed), 4) for seed in range(12)
    }
    monkeypatch.setattr(naming, "block_hash", weak)
    monkeypatch.setattr(manager, "block_hash", weak)
    engine = tiny_engine()
    for seed in [*range(12), *range(12)]:
        assert generate(engine, tokens(18, seed), 4) == expected[seed]
        engine.verify()
    assert engine.stats().num_collisions > 0
    outputs = run_all(engine, [greedy_request(f"{s}", tokens(18, s), 4) for s in range(12)])
    assert all(tokens_of(outputs[f"{seed}"]) == expected[seed] for seed in range(12))


def test_collision_guard_is_what_protects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the comparison of tokens the same collisions do serve foreign KV: the guard is not idle."""
    import engine_adapter.engine.kv.block_hash as naming
    import engine_adapter.engine.kv.block_manager as manager

    def weak(parent: bytes, token_bytes: bytes) -> bytes:
        return bytes([hashlib.sha256(parent + token_bytes).digest()[0] & 3]) * 32

    expected = {
        seed: generate(tiny_engine(enable_prefix_caching=False), tokens(18, seed), 4) for seed in range(8)
    }
    monkeypatch.setattr(naming, "block_hash", weak)
    monkeypatch.setattr(manager, "block_hash", weak)
    monkeypatch.setattr(PrefixCache, "get", lambda cache, name, *_: cache._by_hash.get(name))
    engine = tiny_engine()
    assert any(generate(engine, tokens(18, seed), 4) != expected[seed] for seed in range(8))


@pytest.mark.parametrize("window", [None, 24])
def test_thousand_mixed_requests_on_a_tiny_pool(window: int | None) -> None:
    """Shared prefixes, priorities, aborts; then with a window, a pin and a tier: no leak, all add up."""
    chance = random.Random(1)
    engine = tiny_engine(
        dataclasses.replace(TINY, num_hidden_layers=1, sliding_window=window),
        num_kv_blocks=18,
        max_num_sequences=6,
        max_batch_tokens=24,
        max_prefill_tokens_beside_decodes=8,
        tiers=TierConfig(host_bytes=1 << 14 if window else 0),
    )
    stems = [tokens(length, seed) for seed, length in enumerate((8, 20, 30))]
    if window:
        engine.pins.pin(PinSpec(token_ids=tuple(stems[2][:16])))
    open_requests: set[str] = set()
    ended: dict[str, FinishReason | None] = {}
    num_added = num_steps = 0
    while num_added < 1000 or engine.has_work:
        while num_added < 1000 and len(open_requests) < 12:
            prompt = chance.choice(stems)[: chance.randint(1, 30)] + tokens(chance.randint(0, 12), num_added)
            sampling = SamplingParams(
                temperature=chance.choice([0.0, 0.0, 1.0]),
                max_tokens=chance.choice([1, 2, 3, 15]),
                seed=num_added,
            )
            engine.add_request(
                EngineRequest(
                    request_id=f"r{num_added}",
                    prompt_token_ids=prompt or [1],
                    sampling=sampling,
                    cache_salt=chance.choice(["", "", "a"]),
                    priority=chance.randint(0, 2),
                )
            )
            open_requests.add(f"r{num_added}")
            num_added += 1
        for output in engine.step():
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason
                open_requests.discard(output.request_id)
        if open_requests and chance.random() < 0.1:
            victim = chance.choice(sorted(open_requests))
            assert engine.abort(victim)
            open_requests.discard(victim)
            ended[victim] = FinishReason.ABORT
        num_steps += 1
        assert num_steps < 20_000, "no progress"
        assert_gauges_add_up(engine)
        if num_steps % 20 == 0:
            engine.verify()
    stats = engine.stats()
    assert len(ended) == 1000
    assert not open_requests
    assert (stats.num_blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert set(ended.values()) == {FinishReason.LENGTH, FinishReason.ABORT}
    assert stats.num_preemptions > 0
    assert stats.num_hit_tokens > 0
    assert stats.num_blocks_pinned == (4 if window else 0)
    engine.verify()


def test_neighbours_do_not_change_a_sampled_text() -> None:
    """With a seed, text at temperature 1 is the same alone, in a batch, warm, and after preemption."""
    sampling = SamplingParams(temperature=1.0, max_tokens=8, seed=42)
    request = EngineRequest(request_id="r", prompt_token_ids=tokens(10), sampling=sampling)
    alone = tokens_of(run_all(tiny_engine(), [request])["r"])
    engine = tiny_engine(num_kv_blocks=8)
    for _ in range(2):
        others = [greedy_request(f"o{i}", tokens(9, 50 + i), 9) for i in range(3)]
        late = EngineRequest(request_id="r", prompt_token_ids=tokens(10), sampling=sampling, priority=1)
        assert tokens_of(run_all(engine, [*others, late])["r"]) == alone
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_dtypes_run_with_reuse(dtype: str) -> None:
    """bf16 and fp16 engines generate, hit, and store KV in their own type."""
    engine = tiny_engine(dtype=dtype)
    assert engine.storage.bytes_per_token == tiny_engine().storage.bytes_per_token // 2
    for cached in (0, 16):
        outputs = run_all(engine, [greedy_request("r", tokens(17), 4)])["r"]
        assert len(tokens_of(outputs)) == 4
        assert outputs[-1].num_cached_tokens == cached


def test_threads_are_one_unless_told_otherwise() -> None:
    """Building an engine limits torch to the configured threads."""
    tiny_engine()
    assert torch.get_num_threads() == 1


def test_auto_dtype_is_native() -> None:
    """`auto` never chooses bf16 on a processor that emulates it."""
    with open("/proc/cpuinfo") as file:
        flags = file.read()
    native = "avx512_bf16" in flags or "amx_bf16" in flags
    assert fast_dtype("cpu") is (torch.bfloat16 if native else torch.float32)
    assert fast_dtype("cuda:0") is torch.bfloat16


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "fp64"},
        {"kv_dtype": "int4"},
        {"pin_budget_fraction": 1.0},
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    """A setting that means nothing fails when it is made, not when it is used."""
    with pytest.raises(ValueError, match=next(iter(settings))):
        EngineConfig(**settings)


def test_tiny_model_is_small() -> None:
    """The exactness tests stay quick because the model has a few thousand weights."""
    assert TINY.hidden_size * TINY.vocab_size < 10_000
