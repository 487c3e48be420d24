"""Results of a run: hit rate against an unbounded cache, TTFT, balance, moves by cause.

Only requests that arrived after the warm-up and were answered count. Percentiles use the nearest-rank rule.
`hit_of_bound` is the cached prompt tokens over those of one cache that never evicts, in order of arrival.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from gateway.replay.simulator import SimulatedOutcome, SimulationResult
from gateway.values import Affinity

_WINDOW_S = 60.0


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run; times in seconds, shares between 0 and 1."""

    policy: str
    num_requests: int
    hit: float
    hit_of_bound: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    utilisation: float
    balance: float  # the busiest engine's prefill work over the mean, for the whole run
    balance_per_minute: float  # the same per minute, weighted by work
    moved: float  # share of follow-up turns that were served elsewhere than the turn before
    moves: dict[str, int]  # by cause
    broken: int
    retried: int


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile of values in ascending order."""
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


def measure(
    result: SimulationResult, bound: Sequence[int] | None = None, *, label: str | None = None
) -> Measures:
    """Reduce a run to its numbers. `bound` comes from `trace.unbounded_hits`."""
    turns, plan = result.trace.turns, result.plan
    counted = [
        index
        for index, outcome in enumerate(result.outcomes)
        if outcome.arrived_s >= plan.warm_up_s and not math.isnan(outcome.ttft_s)
    ]
    outcomes = [result.outcomes[index] for index in counted]
    ttft = sorted(outcome.ttft_s for outcome in outcomes)
    prompt = sum(turns[index].prompt_tokens for index in counted) or 1
    cached = sum(outcome.cached_tokens for outcome in outcomes)
    best = sum(bound[index] for index in counted) if bound is not None else 0
    span_s = max((outcome.arrived_s for outcome in outcomes), default=0.0) - plan.warm_up_s
    work = [0.0] * result.num_engines
    for outcome in outcomes:
        work[outcome.engine] += outcome.work_s
    mean_work = sum(work) / len(work) if work else 0.0
    moved, stayed = _moves(result, counted)
    return Measures(
        policy=label or plan.routing.policy,
        num_requests=len(counted),
        hit=cached / prompt,
        hit_of_bound=cached / best if best else math.nan,
        ttft_mean_s=sum(ttft) / len(ttft) if ttft else math.nan,
        ttft_p50_s=percentile(ttft, 0.5),
        ttft_p90_s=percentile(ttft, 0.9),
        ttft_p99_s=percentile(ttft, 0.99),
        utilisation=sum(work) / (span_s * len(work)) if span_s > 0 else math.nan,
        balance=max(work) / mean_work if mean_work else math.nan,
        balance_per_minute=_balance_per_minute(outcomes, result.num_engines, plan.warm_up_s),
        moved=sum(moved.values()) / max(1, sum(moved.values()) + stayed),
        moves=dict(sorted(moved.items())),
        broken=result.broken,
        retried=result.retried,
    )


def _moves(result: SimulationResult, counted: list[int]) -> tuple[Counter[str], int]:
    """Count turns that went elsewhere than the turn before, by reason, and turns that stayed."""
    moved: Counter[str] = Counter()
    stayed = 0
    for index in counted:
        before = result.trace.turns[index].follows
        if before < 0 or result.outcomes[before].engine < 0:
            continue
        outcome = result.outcomes[index]
        if outcome.engine == result.outcomes[before].engine:
            stayed += 1
        else:
            moved[outcome.reason if outcome.affinity is not Affinity.HIT else "rebound"] += 1
    return moved, stayed


def _balance_per_minute(outcomes: Sequence[SimulatedOutcome], num_engines: int, start_s: float) -> float:
    windows: dict[int, list[float]] = defaultdict(lambda: [0.0] * num_engines)
    for outcome in outcomes:
        windows[int((outcome.arrived_s - start_s) // _WINDOW_S)][outcome.engine] += outcome.work_s
    total = sum(sum(work) for work in windows.values())
    if not total:
        return math.nan
    return sum(max(work) for work in windows.values()) * num_engines / total
