"""Tiers behind a whole engine: the text never changes, restarts are warm, and nothing on disk is trusted."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engine.test_engine_oracle import COMMON, NUM_OUTPUT_TOKENS, prompt_with, random_tokens, reusable_tokens
from engine.tiny_models import generate, greedy_request, run_all, tiny_engine, tokens_of

from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.core.step_output import StepOutput
from engine_adapter.engine.kv.prefix_cache import CachedBlock
from engine_adapter.engine.kv.tiers import tier_loads
from engine_adapter.engine.kv.tiers.load_planner import LoadPlanner
from engine_adapter.engine.kv.tiers.tier_block import Tier
from engine_adapter.engine.kv.tiers.tier_config import TierConfig
from paged_kv.guards import BlockCorrupted
from paged_kv.transfers import BlockTransfers, InlineStream, Stream

PROMPT = random_tokens(7, 61)  # fifteen full blocks and a token
CASES = [(shared, length) for length in range(1, 20, 3) for shared in (0, 4, 5, 8, 16) if shared <= length]


def tiers(folder: Path | None = None, host_bytes: int = 0) -> TierConfig:
    return TierConfig(host_bytes=host_bytes, disk_path=folder, disk_bytes=2 << 20)


class EagerPlanner(LoadPlanner):
    """Loads whatever is there: a tiny model on a busy machine computes faster than a disk reads."""

    def pays(self, num_tokens: int, bytes_of_tier: Mapping[Tier, int]) -> bool:
        return True


def tiered_engine(folder: Path | None = None, host_bytes: int = 0, **settings: Any) -> LLMEngine:
    """An engine with tiers and every guard on, that loads all it can."""
    settings = {"debug_kv_guards": True, **settings}
    engine = tiny_engine(tiers=tiers(folder, host_bytes), **settings)
    engine.tiers.loads.planner = EagerPlanner()
    return engine


def last_output(engine: LLMEngine, prompt: list[int], **fields: Any) -> tuple[list[int], StepOutput]:
    outputs = run_all(engine, [greedy_request("r", prompt, 6, **fields)])["r"]
    engine.verify()
    return tokens_of(outputs), outputs[-1]


def shut_down(engine: LLMEngine) -> None:
    """End as a worker does, after a last look at every block."""
    engine.tick()
    assert engine.stats().num_integrity_failures == 0
    engine.close()


@pytest.mark.parametrize(
    ("kind", "kv_dtype"), [("host", "fp32"), ("disk", "fp32"), ("both", "fp32"), ("both", "fp8_e4m3")]
)
def test_output_is_the_same_with_and_without_tiers(tmp_path: Path, kind: str, kv_dtype: str) -> None:
    """Warm from the device, from a tier, and partly from each: always the text of an engine without tiers."""
    plain = tiny_engine(enable_prefix_caching=False, kv_dtype=kv_dtype)
    engine = tiered_engine(
        tmp_path if kind != "host" else None, 1 << 17 if kind != "disk" else 0, kv_dtype=kv_dtype
    )
    expected = {case: generate(plain, prompt_with(*case), NUM_OUTPUT_TOKENS) for case in CASES}
    generate(engine, COMMON, NUM_OUTPUT_TOKENS)
    chance = random.Random(3)
    num_loaded = 0
    for case in CASES:
        if chance.random() < 0.6:  # the device forgets, the tiers do not
            if kind != "host":  # a clear drops what has not been written yet
                assert engine.tiers._writer is not None
                assert engine.tiers._writer.flush(30)
            engine.blocks.clear_cache()
        outputs = run_all(engine, [greedy_request("r", prompt_with(*case), NUM_OUTPUT_TOKENS)])["r"]
        assert tokens_of(outputs) == expected[case]
        assert outputs[-1].num_cached_tokens >= reusable_tokens(*case)
        num_loaded += sum(outputs[-1].num_loaded_tokens.values())
        engine.verify()
    assert num_loaded > 0
    shut_down(engine)


@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "int8"}, {"kv_dtype": "bf16"}])
def test_a_restart_comes_back_warm(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The first turn after an orderly restart finds every complete block, and gives the same text."""
    engine = tiered_engine(tmp_path, **settings)
    cold, output = last_output(engine, PROMPT)
    assert output.num_cached_tokens == 0
    shut_down(engine)
    engine = tiered_engine(tmp_path, **settings)
    warm, output = last_output(engine, PROMPT)
    assert warm == cold
    assert output.num_cached_tokens == 60
    assert output.num_loaded_tokens == {"disk": 60}
    again, output = last_output(engine, PROMPT)
    assert (again, output.num_loaded_tokens, output.num_cached_tokens) == (cold, {}, 60)
    shut_down(engine)


def test_answers_are_kept_too(tmp_path: Path) -> None:
    """The next turn resubmits prompt and answer: both are found after a restart."""
    engine = tiered_engine(tmp_path)
    answer = generate(engine, PROMPT, 12)
    shut_down(engine)
    engine = tiered_engine(tmp_path)
    _, output = last_output(engine, [*PROMPT, *answer, 5])
    assert output.num_cached_tokens == 72
    shut_down(engine)


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    """Other weights under the same shape: the folder's blocks are another model's, and are removed."""
    engine = tiered_engine(tmp_path)
    generate(engine, PROMPT)
    shut_down(engine)
    engine = tiered_engine(tmp_path, seed=1)
    expected = generate(tiny_engine(seed=1), PROMPT, 6)
    text, output = last_output(engine, PROMPT)
    assert (text, output.num_cached_tokens) == (expected, 0)
    shut_down(engine)


def test_another_tenant_finds_nothing(tmp_path: Path) -> None:
    """The salt is in the name: equal prompts of two tenants share no block in any tier."""
    engine = tiered_engine(tmp_path, 1 << 17)
    generate(engine, PROMPT, cache_salt="one")
    shut_down(engine)
    engine = tiered_engine(tmp_path, 1 << 17)
    assert last_output(engine, PROMPT, cache_salt="two")[1].num_cached_tokens == 0
    assert last_output(engine, PROMPT, cache_salt="one")[1].num_cached_tokens == 60
    shut_down(engine)


def test_a_damaged_block_is_a_miss(tmp_path: Path) -> None:
    """What is before it is loaded, the rest is computed and stored anew; the text is the same."""
    engine = tiered_engine(tmp_path)
    cold, _ = last_output(engine, PROMPT)
    disk, names = engine.tiers._disk, [entry.block_hash for entry in engine.blocks.prefix_cache]
    shut_down(engine)
    assert disk is not None
    place = disk.find(names[5])
    assert place is not None
    with place.segment.path.open("r+b") as file:
        file.seek(place.segment.shape.payload_start + place.slot * engine.storage.block_bytes + 99)
        file.write(b"?")
    engine = tiered_engine(tmp_path)
    text, output = last_output(engine, PROMPT)
    assert (text, output.num_cached_tokens) == (cold, 20)
    assert engine.stats().tiers["disk"].num_damaged_blocks == 1
    shut_down(engine)
    engine = tiered_engine(tmp_path)
    assert last_output(engine, PROMPT)[1].num_cached_tokens == 60
    shut_down(engine)


def test_a_preempted_sequence_comes_back_from_a_tier(tmp_path: Path) -> None:
    """Two that do not fit together take turns; what is loaded instead of recomputed changes no text."""
    prompts = {name: random_tokens(seed, 40) for seed, name in enumerate("ab")}
    expected = {name: generate(tiny_engine(), prompt, 40) for name, prompt in prompts.items()}
    engine = tiered_engine(None, 1 << 18, num_kv_blocks=24)
    requests = [greedy_request(name, prompt, 40) for name, prompt in prompts.items()]
    outputs = run_all(engine, requests)
    assert {name: tokens_of(parts) for name, parts in outputs.items()} == expected
    assert engine.stats().num_preemptions > 0
    assert engine.stats().tiers["host"].num_hit_tokens > 0
    # Usage is about the first admission: what a preempted one got back is no hit of its request.
    assert all(parts[-1].num_cached_tokens == 0 for parts in outputs.values())
    assert all(parts[-1].num_loaded_tokens == {} for parts in outputs.values())
    shut_down(engine)


class SlowDisk:
    """Wraps the disk tier's `read`: nothing arrives until released."""

    def __init__(self, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_read = threading.Event()
        disk = engine.tiers._disk
        assert disk is not None
        read = disk.read

        def wait_and_read(places: object, rows: object) -> int:
            assert self.may_read.wait(30)
            return read(places, rows)  # type: ignore[arg-type]  # passed on as they came

        monkeypatch.setattr(disk, "read", wait_and_read)


def restarted(folder: Path, **settings: Any) -> LLMEngine:
    """An engine whose disk tier holds PROMPT."""
    engine = tiered_engine(folder, **settings)
    generate(engine, PROMPT)
    shut_down(engine)
    return tiered_engine(folder, **settings)


def test_others_go_on_while_one_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load delays its own sequence and those with the same prefix, no others; twins load once."""
    engine = restarted(tmp_path)
    disk = SlowDisk(engine, monkeypatch)
    for name in ("first", "second"):
        engine.add_request(greedy_request(name, PROMPT, 3))
    engine.add_request(greedy_request("other", random_tokens(9, 30), 5))
    done: list[str] = []
    while "other" not in done:
        done += [output.request_id for output in engine.step() if output.finish_reason]
    assert done == ["other"]
    disk.may_read.set()
    while engine.has_work:
        done += [output.request_id for output in engine.step() if output.finish_reason]
    assert sorted(done) == ["first", "other", "second"]
    assert engine.stats().tiers["disk"].num_hit_tokens == 60
    shut_down(engine)


def test_aborting_a_load_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client leaves while the disk reads: its blocks are free at once, what arrives later is dropped."""
    engine = restarted(tmp_path)
    disk = SlowDisk(engine, monkeypatch)
    engine.add_request(greedy_request("gone", PROMPT, 3))
    engine.step()
    assert engine.tiers.loads.is_loading
    engine.abort("gone")
    assert engine.stats().num_blocks_free == engine.stats().num_blocks_total
    text = generate(engine, random_tokens(9, 30), 4)
    disk.may_read.set()
    assert text == generate(tiny_engine(), random_tokens(9, 30), 4)
    engine.step()
    assert not engine.tiers.loads.is_loading
    engine.verify()
    shut_down(engine)


def test_a_disk_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the limit the prompt is computed."""
    monkeypatch.setattr(tier_loads, "LOAD_TIMEOUT_S", 0.0)
    engine = restarted(tmp_path)
    disk = SlowDisk(engine, monkeypatch)
    text, output = last_output(engine, PROMPT)
    assert (text, output.num_cached_tokens) == (generate(tiny_engine(), PROMPT, 6), 0)
    assert engine.tiers.loads.num_timeouts == 1
    disk.may_read.set()
    shut_down(engine)


def test_a_read_that_fails_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in a reader costs the hit, not the engine."""
    engine = restarted(tmp_path)

    def fail(places: object, rows: object) -> int:
        raise MemoryError("no staging memory")

    monkeypatch.setattr(engine.tiers._disk, "read", fail)
    text, output = last_output(engine, PROMPT)
    assert (text, output.num_cached_tokens) == (generate(tiny_engine(), PROMPT, 6), 0)
    shut_down(engine)


def test_a_tier_slower_than_the_model_is_not_used(tmp_path: Path) -> None:
    """With a measured disk rate far below the prefill rate the prompt is computed."""
    engine = restarted(tmp_path)
    engine.tiers.loads.planner = planner = LoadPlanner()
    planner.observe_prefill(1_000_000, 1.0)
    planner.observe_read(Tier.DISK, 1000, 1.0)
    assert last_output(engine, PROMPT)[1].num_cached_tokens == 0
    assert planner.num_refusals == 1
    shut_down(engine)


def test_what_is_loaded_is_told_like_what_is_computed(tmp_path: Path) -> None:
    """The observer hears of every block that becomes resident, from a tier or not."""

    class Recorder:
        def __init__(self) -> None:
            self.names: set[bytes] = set()

        def record(self, removed: list[CachedBlock], stored: list[CachedBlock]) -> None:
            self.names -= {entry.block_hash for entry in removed}
            self.names |= {entry.block_hash for entry in stored}

    engine = restarted(tmp_path)
    engine._observer = recorder = Recorder()
    generate(engine, PROMPT)
    assert recorder.names == {entry.block_hash for entry in engine.blocks.prefix_cache}
    shut_down(engine)


def test_clearing_clears_every_tier(tmp_path: Path) -> None:
    """After an operator's clear nothing is found anywhere."""
    engine = tiered_engine(tmp_path, 1 << 17)
    generate(engine, PROMPT)
    engine.clear_cache()
    assert last_output(engine, PROMPT)[1].num_cached_tokens == 0
    shut_down(engine)


def test_a_dropped_head_is_stored_with_the_next_block(tmp_path: Path) -> None:
    """While the writer cannot take anything nothing is stored; later the whole chain is, from its head."""
    engine = tiered_engine(tmp_path)
    writer = engine.tiers._writer
    assert writer is not None
    writer._paused_until_s = float("inf")
    answer = generate(engine, PROMPT, 5)
    assert engine.stats().tiers["disk"].num_stored_blocks == 0
    writer._paused_until_s = 0.0
    generate(engine, [*PROMPT, *answer, 1, 2, 3, 4], 2)
    shut_down(engine)
    engine = tiered_engine(tmp_path)
    assert last_output(engine, PROMPT)[1].num_cached_tokens == 60
    shut_down(engine)


class LateEvents(BlockTransfers):
    """Copies that complete only when released, like those of a device's store stream."""

    class Event:
        def __init__(self) -> None:
            self.has_passed = False

        def query(self) -> bool:
            return self.has_passed

    def __init__(self) -> None:
        inline = InlineStream()
        super().__init__(compute=inline, load=inline, store=inline)
        self.events: list[LateEvents.Event] = []

    def store(self, block_ids: Iterable[int], copy_out: Callable[[Stream], None]) -> Event:
        super().store(block_ids, copy_out)
        self.events.append(LateEvents.Event())
        return self.events[-1]


def test_a_tier_gets_no_bytes_before_their_copy_is_complete() -> None:
    """Blocks being copied are in no tier, are not copied twice, and arrive in order."""
    engine = tiered_engine(None, 1 << 17)
    engine.tiers.stores._transfers = transfers = LateEvents()
    answer = generate(engine, PROMPT, 2)
    assert len(transfers.events) == 1
    assert engine.stats().tiers["host"].num_blocks == 0
    generate(engine, [*PROMPT, *answer, 1, 2, 3, 4, 5], 1)
    assert len(transfers.events) == 2
    engine.tiers.stores.settle()
    transfers.events[1].has_passed = True
    engine.tiers.stores.settle()
    assert engine.stats().tiers["host"].num_blocks == 0
    transfers.events[0].has_passed = True
    engine.tiers.stores.settle()
    assert engine.stats().tiers["host"].num_blocks == 17
    engine.blocks.clear_cache()
    assert last_output(engine, PROMPT)[1].num_loaded_tokens == {"host": 60}
    shut_down(engine)


def test_clearing_stops_what_is_under_way() -> None:
    """A copy that completes after the clear brings nothing back."""
    engine = tiered_engine(None, 1 << 17)
    engine.tiers.stores._transfers = transfers = LateEvents()
    generate(engine, PROMPT, 2)
    engine.clear_cache()
    transfers.events[0].has_passed = True
    engine.tiers.stores.settle()
    assert engine.stats().tiers["host"].num_blocks == 0
    shut_down(engine)


def test_the_guards_find_a_write_to_a_shared_block() -> None:
    """In debug mode an idle engine checks every block: one that changed after it was named stops it."""
    engine = tiered_engine()
    generate(engine, PROMPT)
    engine.tick()
    victim = engine.blocks.pool.cached_in_eviction_order()[3]
    engine.storage.write_block(victim, bytes(engine.storage.block_bytes))
    with pytest.raises(BlockCorrupted, match=f"block {victim} changed after it was sealed"):
        engine.tick()


def test_the_guards_find_a_write_to_a_free_block() -> None:
    """A late writer is named when the block is given to the next owner."""
    engine = tiered_engine(num_kv_blocks=20)
    engine.storage.write_block(3, bytes(engine.storage.block_bytes))
    with pytest.raises(BlockCorrupted, match="block 3 was written while it was free"):
        generate(engine, PROMPT)


def test_tiers_need_names() -> None:
    """Without prefix caching there is nothing to store under."""
    with pytest.raises(ValueError, match="prefix caching"):
        tiny_engine(tiers=tiers(None, 1 << 20), enable_prefix_caching=False)
