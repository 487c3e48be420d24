"""`homing simulate`: play a trace through the real router and print the results of each policy.

Reads arguments and prints a table; writes JSON and a plot if asked. It decides nothing about routing.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from gateway.replay import workloads
from gateway.replay.events import EVENT_NAMES, events_named
from gateway.replay.measures import Measures, measure
from gateway.replay.plot import plot_policies
from gateway.replay.readers import read_trace
from gateway.replay.scenarios import (
    SCENARIO_NAMES,
    TEXT_CACHES,
    Scenario,
    make_scenario,
    scenario_of,
    seconds_per_token,
)
from gateway.replay.simulator import Replicas, simulate
from gateway.replay.trace import unbounded_hits
from gateway.routing.settings import POLICY_NAMES, RoutingSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `homing simulate`. Changes the parser."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, help="trace file, Mooncake JSON lines or compact")
    source.add_argument("--scenario", choices=SCENARIO_NAMES, help="a named workload; default: chat")
    parser.add_argument(
        "--traces", type=Path, default=Path("../shared/traces"), help="folder of trace slices"
    )
    parser.add_argument("--backends", type=int, default=8)
    parser.add_argument("--policy", default="homing,round_robin,session_ring", help="names or `all`")
    parser.add_argument(
        "--load", default="0.9", help="0.9 or rr90: of round robin's capacity; aff90: of affinity's"
    )
    parser.add_argument("--cache", default="medium", help="small, medium, large or tokens per backend")
    parser.add_argument("--knowledge", choices=("gateway", "exact"), default="gateway")
    parser.add_argument(
        "--copies", type=int, help="play an open trace this many times at once; default: backends / 4"
    )
    parser.add_argument("--users", type=int, help="closed loop: this many users run the trace's sessions")
    parser.add_argument("--seconds", type=float, default=1600.0, help="length of a closed loop")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1, help="gateways behind round robin")
    parser.add_argument("--private-bindings", action="store_true", help="replicas share no session store")
    parser.add_argument("--exchange-s", type=float, help="seconds between exchanges of load among replicas")
    parser.add_argument("--event", choices=EVENT_NAMES, help="what happens to the fleet half-way through")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--plot", type=Path, help="write a picture here (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    """Run the simulations. Returns the exit status."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        scenario = _scenario(options)
        policies = POLICY_NAMES if options.policy == "all" else tuple(options.policy.split(","))
        load = f"rr{float(options.load) * 100:.0f}" if options.load[0].isdigit() else options.load
        cache = options.cache
        if cache.isdigit():
            scenario = replace(scenario, cache_tokens={cache: int(cache)})
        elif cache not in scenario.cache_tokens:
            raise ValueError(f"cache must be small, medium, large or a number of tokens, not {cache!r}")
        measures = _simulate_all(options, scenario, policies, cache, load)
    except (ValueError, OSError) as error:
        print(f"homing simulate: {error}", file=sys.stderr)
        return 2
    console.print(_table(measures, f"{scenario.name}, {options.backends} backends, {load}, cache {cache}"))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(measures), indent=1))
    if options.plot is not None and not plot_policies(measures, options.plot):
        print("homing simulate: no plot, matplotlib is not installed", file=sys.stderr)
    return 0


def _scenario(options: argparse.Namespace) -> Scenario:
    if options.trace is None:
        return make_scenario(options.scenario or "chat", options.backends, options.traces)
    trace = read_trace(options.trace)
    if options.users is not None:
        trace = workloads.agents(trace, options.users, options.seconds, seed=options.seed)
    elif not trace.is_closed:
        copies = options.copies or max(1, options.backends // 4)
        trace = workloads.superpose(trace, copies, seed=options.seed)
    return scenario_of(trace, options.backends, warm_up_s=0.2 * trace.duration_s, cache_tokens=TEXT_CACHES)


def _simulate_all(
    options: argparse.Namespace, scenario: Scenario, policies: tuple[str, ...], cache: str, load: str
) -> list[Measures]:
    bound = unbounded_hits(scenario.trace)
    cost = seconds_per_token(scenario, cache=cache, load=load)
    half_way_s = 0.5 * (scenario.warm_up_s + scenario.trace.duration_s)
    replicas = Replicas(
        count=options.replicas, shares_bindings=not options.private_bindings, exchange_s=options.exchange_s
    )
    measures = []
    for policy in policies:
        plan = scenario.plan(
            cache=cache,
            s_per_token=cost,
            routing=RoutingSettings(policy=policy),
            knowledge=options.knowledge,
        )
        events = events_named(options.event, options.backends, half_way_s) if options.event else ()
        plan = replace(plan, events=events, replicas=replicas)
        measures.append(measure(simulate(scenario.trace, plan, scenario.facts), bound))
    return measures


def _table(measures: list[Measures], title: str) -> Table:
    table = Table(title=title)
    table.add_column("policy", no_wrap=True)
    for name in ("hit", "of bound", "TTFT mean s", "p50", "p99", "busiest/mean", "moved", "by cause"):
        table.add_column(name, justify="right")
    for item in sorted(measures, key=lambda item: item.ttft_mean_s):
        causes = ", ".join(f"{reason} {count}" for reason, count in item.moves.items())
        table.add_row(
            item.policy,
            f"{item.hit:.3f}",
            f"{item.hit_of_bound:.3f}",
            f"{item.ttft_mean_s:.3f}",
            f"{item.ttft_p50_s:.3f}",
            f"{item.ttft_p99_s:.2f}",
            f"{item.balance_per_minute:.2f}",
            f"{item.moved:.3f}",
            causes,
        )
    return table
