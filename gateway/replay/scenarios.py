"""Named workloads, and the engine speed for a wanted load: what `homing simulate` and the grid run.

A load is relative to a reference policy: `rr90` means engines so fast that round robin keeps them 90 % busy
with prefill, `aff90` that a policy with full affinity does. The work of the reference is measured in a run on
engines so fast that nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.replay import light, workloads
from gateway.replay.engines import EngineSpeed
from gateway.replay.facts import facts_of
from gateway.replay.readers import read_trace
from gateway.replay.simulator import SimulationPlan, simulate
from gateway.replay.trace import Trace
from gateway.routing.settings import RoutingSettings
from gateway.values import RequestFacts

_FAST_S_PER_TOKEN = 1e-7
_MEASURED_RAMP_SHARE = 0.6  # of the warm-up


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A workload for a fleet of one size, without policy and load."""

    name: str
    trace: Trace
    facts: list[RequestFacts]
    num_engines: int
    warm_up_s: float
    cache_tokens: dict[str, int]  # by size: small, medium, large

    @property
    def horizon_s(self) -> float:
        return self.trace.duration_s if self.trace.is_closed else float("inf")

    def plan(
        self, *, cache: str, s_per_token: float, routing: RoutingSettings, knowledge: str
    ) -> SimulationPlan:
        assert knowledge in ("gateway", "exact")
        return SimulationPlan(
            num_engines=self.num_engines,
            speed=EngineSpeed(prefill_s_per_token=s_per_token, cache_tokens=self.cache_tokens[cache]),
            routing=routing,
            knowledge="exact" if knowledge == "exact" else "gateway",
            warm_up_s=self.warm_up_s,
            ramp_s=_MEASURED_RAMP_SHARE * self.warm_up_s,
            horizon_s=self.horizon_s,
        )


_CHAT_CACHES = {"small": 250_000, "medium": 1_000_000, "large": 4_000_000}
TEXT_CACHES = {"small": 500_000, "medium": 2_000_000, "large": 8_000_000}
_AGENT_CACHES = {"small": 1_000_000, "medium": 3_000_000, "large": 10_000_000}
# room for two agents of 17,000 tokens in the smaller ones, for eight in the large
_LIGHT_CACHES = {"small": 40_000, "medium": 60_000, "large": 160_000}
_SLOT_CACHES = {"small": 8_000, "medium": 16_000, "large": 32_000}


def make_scenario(name: str, num_engines: int, traces: Path) -> Scenario:
    """Build a named scenario. Raises FileNotFoundError if `traces` lacks its trace slice."""
    builders: dict[str, Callable[[], tuple[Trace, float, dict[str, int]]]] = {
        "conversation": lambda: (_conversation(traces, num_engines), 180.0, TEXT_CACHES),
        "agent": lambda: (_agent(traces, num_engines), 400.0, _AGENT_CACHES),
        "chat": lambda: (workloads.chat(200 * num_engines, 1000.0), 300.0, _CHAT_CACHES),
        "documents": lambda: (workloads.documents(300 * num_engines, 1000.0), 200.0, TEXT_CACHES),
        "apps": lambda: (workloads.apps(500 * num_engines, 850.0), 250.0, TEXT_CACHES),
        "ramp": lambda: (workloads.ramp(500 * num_engines, 850.0), 0.0, TEXT_CACHES),
        "light_agents": lambda: (light.agents(2 * num_engines), 0.0, _LIGHT_CACHES),
        "light_forks": lambda: (light.forks(2 * num_engines), 0.0, _LIGHT_CACHES),
        "light_slots": lambda: (light.slots(2 * num_engines), 0.0, _SLOT_CACHES),
    }
    if name not in builders:
        raise ValueError(f"unknown scenario {name!r}: one of {', '.join(builders)}")
    trace, warm_up_s, caches = builders[name]()
    return scenario_of(trace, num_engines, warm_up_s=warm_up_s, cache_tokens=caches)


def scenario_of(
    trace: Trace, num_engines: int, *, warm_up_s: float, cache_tokens: dict[str, int]
) -> Scenario:
    """Make a scenario of any trace."""
    return Scenario(
        name=trace.name,
        trace=trace,
        facts=facts_of(trace),
        num_engines=num_engines,
        warm_up_s=warm_up_s,
        cache_tokens=cache_tokens,
    )


SCENARIO_NAMES = (
    *("conversation", "agent", "chat", "documents", "apps", "ramp"),
    *("light_agents", "light_forks", "light_slots"),
)


def _conversation(traces: Path, num_engines: int) -> Trace:
    slice_ = read_trace(traces / "mooncake_conv_15min.jsonl", name="conversation")
    return workloads.superpose(slice_, max(1, num_engines // 4))


def _agent(traces: Path, num_engines: int) -> Trace:
    slice_ = read_trace(traces / "cc_60sessions.compact.jsonl", name="agent")
    return workloads.agents(slice_, 24 * num_engines, 1600.0)


def seconds_per_token(scenario: Scenario, *, cache: str, load: str) -> float:
    """Return the prefill cost per token at which the reference policy is as busy as `load` says.

    `load` is `rr` or `aff` and a percentage, as in `rr90`.
    """
    reference, percent = load.rstrip("0123456789"), load.lstrip("abcdefghijklmnopqrstuvwxyz")
    if reference not in ("rr", "aff") or not percent:
        raise ValueError(f"load must be rr or aff and a percentage, like rr90, not {load!r}")
    policy = "round_robin" if reference == "rr" else "weighted_scores"
    plan = scenario.plan(
        cache=cache,
        s_per_token=_FAST_S_PER_TOKEN,
        routing=RoutingSettings(policy=policy),
        knowledge="exact",
    )
    plan = replace(plan, speed=replace(plan.speed, prefill_fixed_s=0.0))
    result = simulate(scenario.trace, plan, scenario.facts)
    measured = [
        outcome
        for outcome in result.outcomes
        if outcome.arrived_s >= plan.warm_up_s and not math.isnan(outcome.ttft_s)
    ]
    span_s = max(outcome.arrived_s for outcome in measured) - plan.warm_up_s
    token_equivalents = sum(outcome.work_s for outcome in measured) / _FAST_S_PER_TOKEN
    busy_s = int(percent) / 100 * scenario.num_engines * span_s
    fixed_s = EngineSpeed().prefill_fixed_s * len(measured)
    return max(1e-9, (busy_s - fixed_s) / token_equivalents)
