"""Light load: no request waits for another, so only room, weights and bounds tell where sessions go."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gateway.replay import light
from gateway.replay.engines import EngineSpeed
from gateway.replay.simulator import SimulationPlan, SimulationResult, simulate
from gateway.replay.trace import Trace

TOKENS_PER_S = 8_000


def play(trace: Trace, *, cache_tokens: int, num_engines: int = 4, **changes: Any) -> SimulationResult:
    speed = EngineSpeed(prefill_s_per_token=1 / TOKENS_PER_S, cache_tokens=cache_tokens)
    return simulate(trace, SimulationPlan(num_engines=num_engines, speed=speed, **changes))


def cached_share(result: SimulationResult) -> float:
    """Of the prompt tokens from the second turn on."""
    later = [(turn, out) for turn, out in zip(result.trace.turns, result.outcomes, strict=True) if turn.turn]
    return sum(out.cached_tokens for _, out in later) / sum(turn.prompt_tokens for turn, _ in later)


@pytest.mark.parametrize(
    ("trace", "cache_tokens", "least"),
    [
        (light.agents(8), 60_000, 0.99),
        (light.agents(12), 60_000, 0.99),  # three on each, and not a token to spare
        (light.forks(8), 60_000, 0.99),
        (light.slots(8), 8_000, 0.96),
    ],
    ids=["agents", "full", "forks", "slots"],
)
def test_sessions_spread_by_the_room_that_they_need(trace: Trace, cache_tokens: int, least: float) -> None:
    """N01: with room for all, all keep their cache; they were all sent to one engine, which kept none."""
    assert cached_share(play(trace, cache_tokens=cache_tokens)) >= least


def test_forks_stay_together_where_there_is_room() -> None:
    """What they share is computed three times, not eight."""
    result = play(light.forks(8), cache_tokens=120_000)
    first = result.outcomes[:8]
    assert sum(out.cached_tokens >= 8_000 - 16 for out in first) >= 5


@pytest.mark.parametrize("at_a_time", [1, 4, 8, 32])
@pytest.mark.parametrize("prompt_tokens", [100, 1_000, 4_000])
@pytest.mark.parametrize("weights", [(1.0, 3.0), (1.0, 2.0, 1.0)])
def test_weights_are_shares_of_new_sessions(
    weights: tuple[float, ...], prompt_tokens: int, at_a_time: int
) -> None:
    """G07: within five points, however many come at a time."""
    trace = light.new_sessions(480, at_a_time, prompt_tokens=prompt_tokens)
    result = play(trace, cache_tokens=400_000, num_engines=len(weights), weights=weights)
    counts = Counter(out.engine for out in result.outcomes)
    for number, weight in enumerate(weights):
        assert counts[number] / 480 == pytest.approx(weight / sum(weights), abs=0.05)


def test_without_weights_a_shared_prompt_is_no_magnet() -> None:
    """G07: one system prompt, eight idle engines, one session after the other. Half went to one of them."""
    result = play(light.new_sessions(320, 1), cache_tokens=400_000, num_engines=8)
    counts = Counter(out.engine for out in result.outcomes)
    assert len(counts) >= 6
    assert max(counts.values()) <= 0.2 * 320


def test_a_hot_key_spreads_to_the_bound() -> None:
    """G01: bound once, and then asked 45 times at once."""
    trace, facts = light.hot_key(45)
    plan = SimulationPlan(num_engines=3, speed=EngineSpeed(prefill_s_per_token=1 / TOKENS_PER_S))
    counts = Counter(out.engine for out in simulate(trace, plan, facts).outcomes)
    assert max(counts.values()) <= 20
