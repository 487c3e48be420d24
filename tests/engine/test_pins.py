"""Pins: budget, counts, partial pins, lifetime, restart, and running beside requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engine.tiny_models import generate, greedy_request, run_all, tiny_loaded
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_adapter.engine.core.config import EngineConfig
from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.kv.pin_manifest import read_manifest
from engine_adapter.engine.kv.pins import PinRefused, PinSpec, PinState
from engine_adapter.engine.kv.sequence import FinishReason


class WallClock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def pinned_engine(
    manifest: Path | None = None, clock: WallClock | None = None, seed: int = 0, **settings: Any
) -> LLMEngine:
    config = EngineConfig(
        **{
            "dtype": "fp32",
            "block_size": 4,
            "num_kv_blocks": 16,
            "pin_manifest_path": manifest,
            **settings,
        }
    )
    return LLMEngine(tiny_loaded(seed=seed), config, wall_clock=clock or WallClock())


def prefix(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(97), k=length))


def run_idle(engine: LLMEngine) -> None:
    while engine.has_work:
        assert engine.step() == [], "an internal request must not be reported"


def cached_tokens(engine: LLMEngine, prompt: list[int], **fields: Any) -> int:
    return run_all(engine, [greedy_request("probe", prompt, 1, **fields)])["probe"][-1].num_cached_tokens


def flood(engine: LLMEngine) -> None:
    """Push everything unpinned out of the cache."""
    for seed in range(6):
        generate(engine, list(prefix(40, 100 + seed)), 1)


def test_pin_computes_holds_and_survives_pressure() -> None:
    """A prefix that was never sent is computed, pinned, and still there after many other prompts."""
    engine = pinned_engine()
    pin = engine.pins.pin(PinSpec(token_ids=prefix(18), name="support"))
    before = pin.state
    run_idle(engine)
    assert (before, pin.state) == (PinState.PENDING, PinState.PINNED)
    assert len(pin.block_ids) == 4
    assert engine.stats().num_blocks_pinned == 4
    flood(engine)
    assert cached_tokens(engine, [*prefix(18), 1, 2]) == 16
    engine.verify()


def test_resident_prefix_is_pinned_at_once() -> None:
    """Nothing is computed for what is already cached."""
    engine = pinned_engine()
    generate(engine, list(prefix(20)), 1)
    pin = engine.pins.pin(PinSpec(token_ids=prefix(16)))
    assert pin.state is PinState.PINNED
    assert not engine.has_work


def test_unpin_makes_blocks_evictable() -> None:
    """After the unpin, pressure takes the blocks."""
    engine = pinned_engine()
    pin = engine.pins.pin(PinSpec(token_ids=prefix(16)))
    run_idle(engine)
    assert engine.pins.unpin(pin.pin_id)
    assert engine.stats().num_blocks_pinned == 0
    flood(engine)
    assert cached_tokens(engine, [*prefix(16), 1]) == 0
    assert not engine.pins.unpin(pin.pin_id)
    assert not engine.pins.unpin("unknown")
    engine.verify()


def test_double_pin_needs_double_unpin() -> None:
    """Two owners of one prefix: it stays until both unpin it, and its blocks count once."""
    engine = pinned_engine()
    first = engine.pins.pin(PinSpec(token_ids=prefix(16), owner="a"))
    second = engine.pins.pin(PinSpec(token_ids=prefix(16), owner="b"))
    run_idle(engine)
    assert engine.stats().num_blocks_pinned == 4
    engine.pins.unpin(first.pin_id)
    assert engine.stats().num_blocks_pinned == 4
    engine.pins.unpin(second.pin_id)
    assert engine.stats().num_blocks_pinned == 0
    engine.verify()


def test_budget_cuts_a_pin_and_says_so() -> None:
    """A prefix beyond the budget is pinned in part, reported as partial; the next pin is refused."""
    engine = pinned_engine()
    pin = engine.pins.pin(PinSpec(token_ids=prefix(44)))
    run_idle(engine)
    assert pin.state is PinState.PARTIAL
    assert len(pin.block_ids) == 8
    with pytest.raises(PinRefused, match="budget"):
        engine.pins.pin(PinSpec(token_ids=prefix(8, seed=1)))
    assert len(engine.pins.table) == 1
    engine.verify()


def test_requests_are_served_beside_a_full_pin_budget() -> None:
    """With the budget used up, what fits beside it is served, and what never can ends at once."""
    engine = pinned_engine()
    engine.pins.pin(PinSpec(token_ids=prefix(32)))
    run_idle(engine)
    assert len(generate(engine, list(prefix(27, seed=5)), 4)) == 4
    outputs = run_all(engine, [greedy_request("big", list(prefix(50, seed=6)), 4)])["big"]
    assert outputs[-1].finish_reason is FinishReason.CAPACITY
    engine.verify()


def test_better_priority_displaces_worse_pins_only() -> None:
    """A more important pin takes the budget of a less important one, never of an equal one."""
    engine = pinned_engine()
    worse = engine.pins.pin(PinSpec(token_ids=prefix(32, 1), priority=5))
    run_idle(engine)
    better = engine.pins.pin(PinSpec(token_ids=prefix(20, 2), priority=1))
    run_idle(engine)
    assert engine.pins.table.get(worse.pin_id) is None
    assert better.state is PinState.PINNED
    engine.pins.pin(PinSpec(token_ids=prefix(32, 3), priority=1))
    with pytest.raises(PinRefused):
        engine.pins.pin(PinSpec(token_ids=prefix(32, 4), priority=1))
    engine.verify()


def test_time_to_live_runs_under_steady_reads() -> None:
    """Reading a pinned prefix does not extend its life; after it, the blocks are evictable."""
    clock = WallClock()
    engine = pinned_engine(clock=clock)
    engine.pins.pin(PinSpec(token_ids=prefix(16), expires_at_wall_s=clock.now_s + 60))
    run_idle(engine)
    for _ in range(5):
        clock.now_s += 11
        assert cached_tokens(engine, [*prefix(16), 1]) == 16
    assert engine.stats().num_blocks_pinned == 4
    clock.now_s += 11
    engine.tick()
    assert engine.stats().num_blocks_pinned == 0
    assert len(engine.pins.table) == 0
    with pytest.raises(PinRefused, match="lifetime has already ended"):
        engine.pins.pin(PinSpec(token_ids=prefix(16), expires_at_wall_s=clock.now_s))


def test_pin_shorter_than_a_block_is_refused() -> None:
    """There is nothing to hold for a prefix without a full block."""
    with pytest.raises(PinRefused, match="full block"):
        pinned_engine().pins.pin(PinSpec(token_ids=prefix(3)))


def test_pin_is_of_one_tenant() -> None:
    """Another salt neither hits nor shares the pinned blocks, and its own pin holds its own blocks."""
    engine = pinned_engine()
    engine.pins.pin(PinSpec(token_ids=prefix(16), cache_salt="a"))
    run_idle(engine)
    assert cached_tokens(engine, [*prefix(16), 1], cache_salt="b") == 0
    assert cached_tokens(engine, [*prefix(16), 1], cache_salt="a") == 16
    engine.pins.pin(PinSpec(token_ids=prefix(16), cache_salt="b"))
    run_idle(engine)
    assert engine.stats().num_blocks_pinned == 8


def test_unpin_while_pending_stops_the_computation() -> None:
    """A pin taken back before it was computed leaves nothing running and nothing held."""
    engine = pinned_engine(max_batch_tokens=32)
    pin = engine.pins.pin(PinSpec(token_ids=prefix(32)))
    assert engine.pins.unpin(pin.pin_id)
    assert not engine.has_work
    assert engine.stats().num_blocks_free == 16
    engine.verify()


def test_pins_come_back_after_a_restart(tmp_path: Path) -> None:
    """A new process with the same model restores pins from the manifest before it calls itself restored."""
    manifest, clock = tmp_path / "state" / "pins.json", WallClock()
    engine = pinned_engine(manifest, clock)
    kept = engine.pins.pin(PinSpec(token_ids=prefix(16), name="kept", owner="me", priority=3))
    engine.pins.pin(PinSpec(token_ids=prefix(8, 1), expires_at_wall_s=clock.now_s + 5))
    gone = engine.pins.pin(PinSpec(token_ids=prefix(8, 2)))
    engine.pins.unpin(gone.pin_id)
    run_idle(engine)
    assert manifest.stat().st_mode & 0o077 == 0, "prompts are nobody else's business"

    clock.now_s += 10
    restarted = pinned_engine(manifest, clock)
    assert not restarted.pins.is_restored
    run_idle(restarted)
    assert restarted.pins.is_restored
    (pin,) = restarted.pins.table.pins
    assert (pin.pin_id, pin.spec.name, pin.spec.owner, pin.spec.priority) == (kept.pin_id, "kept", "me", 3)
    assert pin.state is PinState.PINNED
    assert cached_tokens(restarted, [*prefix(16), 1]) == 16


def test_manifest_of_another_model_or_broken_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens of another model are not applied, garbage is not fatal; both are reported."""
    manifest = tmp_path / "pins.json"
    engine = pinned_engine(manifest)
    engine.pins.pin(PinSpec(token_ids=prefix(16)))
    other_model = pinned_engine(manifest, seed=1)
    assert len(other_model.pins.table) == 0
    for garbage in (b"", b"{", b'{"version": 1}', b'{"version":1,"fingerprint":"x","pins":[{"pin_id":3}]}'):
        manifest.write_bytes(garbage)
        assert read_manifest(manifest, "x", 0.0) == {}
    assert "pin_manifest_of_another_model" in caplog.text
    assert "pin_manifest_unreadable" in caplog.text


def test_unwritable_manifest_keeps_the_pin_and_reports(tmp_path: Path) -> None:
    """A pin is held even if it cannot be made durable, and the service says so."""
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    engine = pinned_engine(blocker / "pins.json")
    pin = engine.pins.pin(PinSpec(token_ids=prefix(16)))
    run_idle(engine)
    assert pin.state is PinState.PINNED
    assert engine.pins.manifest_error is not None


def test_no_pins_without_a_prefix_cache() -> None:
    """With caching off there is nothing to hold: a pin is refused, not accepted and forgotten."""
    with pytest.raises(PinRefused):
        pinned_engine(enable_prefix_caching=False).pins.pin(PinSpec(token_ids=prefix(16)))


class PinsUnderPressure(RuleBasedStateMachine):
    """Pins, unpins, expiry and requests on one small real engine."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = WallClock()
        self.engine = pinned_engine(clock=self.clock, num_kv_blocks=10, max_batch_tokens=32)
        self.num_requests = 0

    @rule(seed=st.integers(0, 2), blocks=st.integers(1, 6), priority=st.integers(0, 1), ttl=st.booleans())
    def pin(self, seed: int, blocks: int, priority: int, ttl: bool) -> None:
        expiry = self.clock.now_s + 10 if ttl else None
        spec = PinSpec(token_ids=prefix(blocks * 4, seed), priority=priority, expires_at_wall_s=expiry)
        try:
            self.engine.pins.pin(spec)
        except PinRefused:
            assert self.engine.pins.table.pins

    @precondition(lambda self: len(self.engine.pins.table) > 0)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(self.engine.pins.table.pins))
        assert self.engine.pins.unpin(pin.pin_id)

    @rule(seconds=st.integers(1, 11))
    def time_passes(self, seconds: int) -> None:
        self.clock.now_s += seconds
        self.engine.tick()

    @rule(seed=st.integers(0, 3), length=st.integers(1, 16))
    def request(self, seed: int, length: int) -> None:
        self.num_requests += 1
        self.engine.add_request(greedy_request(f"r{self.num_requests}", list(prefix(length, seed)), 2))

    @rule()
    def step(self) -> None:
        self.engine.step()

    @invariant()
    def everything_adds_up(self) -> None:
        self.engine.verify()
        stats = self.engine.stats()
        assert stats.num_blocks_pinned <= 5
        for pin in self.engine.pins.table.pins:
            assert len(pin.block_ids) <= pin.num_allowed_blocks <= len(pin.hashes)
            assert (pin.state is PinState.PINNED) == (len(pin.block_ids) == len(pin.hashes))

    def teardown(self) -> None:
        """Pins never stop requests: all that was asked ends in bounded time."""
        for _ in range(400):
            if not self.engine.has_work:
                break
            self.engine.step()
        assert not self.engine.has_work
        assert self.engine.stats().num_blocks_used == 0
        self.engine.verify()


TestPinsUnderPressure = PinsUnderPressure.TestCase
TestPinsUnderPressure.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestPinsUnderPressure.__doc__ = "No order of pins, expiries and requests breaks the budget or liveness."
