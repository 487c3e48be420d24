"""`make bench-curves`: how Homing's cost grows, beside vllm-router and nginx, and what its options cost.

    python tests/bench/gateway/curves.py [--only GROUP,...] [--repetitions 3] [--limit-s 580]

As in `run.py`, each gateway is pinned to the last CPU, engine and load to the first, and all of one group are
measured once before any is measured again. Groups: backends, loads, processes, options, idle. Never asserts:
it prints and stores. What is not done after the limit is left out, and the report says so.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.gateway.bodies import write_bodies, write_curve_bodies
from bench.gateway.curve_plan import ENGINE_PORTS, GROUPS, Cell, usual
from bench.gateway.curve_report import Curves, write_curves
from bench.gateway.idle_connections import allowed_counts, measure_idle
from bench.gateway.measure import cpu_s, measure, set_engine
from bench.gateway.peers import Peer
from bench.gateway.run import (
    CACHE,
    RESULTS,
    OutOfTime,
    Running,
    compile_tool,
    describe,
    end_cleanly,
    only_run,
    start_all,
    start_engine,
    stop_all,
)

IDLE_GROUP, IDLE_S = "idle", 3.0


class CurveRun:
    """All results so far, and the tools to add more."""

    def __init__(self, repetitions: int) -> None:
        self.repetitions = repetitions
        self.curves: Curves = {}
        self.absent: list[str] = []
        self.generator = compile_tool("load_generator")
        self.bodies = write_bodies(CACHE / "bodies") | write_curve_bodies(CACHE / "bodies")

    def measure_group(self, cells: list[Cell]) -> None:
        """Start the gateways of the cells, measure every cell in turn `repetitions` times, stop them."""
        self._with_peers([cell.peer for cell in cells], lambda running: self._measure_cells(cells, running))

    def measure_idle(self, counts: tuple[int, ...]) -> None:
        """KB per idle connection, each time in a process that was just started: memory is not given back."""

        def measure_all(running: Running) -> None:
            for series, peer in usual().items():
                if peer.name in running:
                    self._measure_idle_of(series, peer, running[peer.name][0].pid, counts)

        for _ in range(min(self.repetitions, 2)):
            self._with_peers(usual().values(), measure_all)

    def _with_peers(self, peers: Iterable[Peer], use: Callable[[Running], None]) -> None:
        running: Running = {}
        try:
            absent = start_all(list({peer.name: peer for peer in peers}.values()), running)
            self.absent += [reason for reason in absent if reason not in self.absent]
            use(running)
        finally:
            stop_all(running)

    def _measure_cells(self, cells: list[Cell], running: Running) -> None:
        cells = [cell for cell in cells if cell.peer.name in running]
        for repetition in range(self.repetitions + 1):  # the first is warm-up
            for cell in cells:
                scenario = cell.scenario
                if repetition == 0:
                    scenario = replace(scenario, duration_s=0.4, num_events=min(scenario.num_events, 3))
                set_engine(ENGINE_PORTS[0], scenario)
                pid, bodies = running[cell.peer.name][0].pid, self.bodies[scenario.bodies]
                result = measure(self.generator, cell.peer.port, pid, scenario, bodies, "0")
                if repetition:
                    self._add(cell.curve, cell.series, cell.x, result)
            if repetition:
                self._measure_rest([cell for cell in cells if cell.curve == "backends"], running)

    def _measure_rest(self, cells: list[Cell], running: Running) -> None:
        """CPU of gateways that nobody asks anything: probes, scrapes, timers."""
        if not cells:
            return
        pids = [running[cell.peer.name][0].pid for cell in cells]
        before = [(time.monotonic(), cpu_s(pid)) for pid in pids]
        time.sleep(IDLE_S)
        for cell, pid, (start_s, spent_s) in zip(cells, pids, before, strict=True):
            busy = (cpu_s(pid) - spent_s) / (time.monotonic() - start_s)
            result = {"idle_ms_per_s": busy * 1e3, "num_bad": 0, "num_errors": 0}
            self._add("backends, no requests", cell.series, cell.x, result)

    def _measure_idle_of(self, series: str, peer: Peer, pid: int, counts: tuple[int, ...]) -> None:
        try:
            results = measure_idle(peer.port, pid, counts)
        except (OSError, http.client.HTTPException) as error:
            results = {counts[-1]: {"failure": f"{type(error).__name__}: {error}"}}
        for count, result in results.items():
            self._add("idle connections", series, str(count), result)

    def _add(self, curve: str, series: str, x: str, result: dict[str, Any]) -> None:
        self.curves.setdefault(curve, {}).setdefault(series, {}).setdefault(x, []).append(result)
        metrics = ("cpu_us_per_event", "cpu_us_per_request", "kb_per_connection", "idle_ms_per_s", "failure")
        metric = next(metric for metric in metrics if metric in result)
        value = result[metric] if metric == "failure" else f"{result[metric]:9.1f} {metric}"
        print(f"{curve:24} {x:>20} {series:30} {value}", flush=True)


def measure_groups(run: CurveRun, groups: list[str], counts: tuple[int, ...]) -> None:
    """Measure the groups in order against one mock engine."""
    engine = start_engine(compile_tool("mock_engine"), ENGINE_PORTS)
    try:
        for group in groups:
            if group == IDLE_GROUP:
                run.measure_idle(counts)
            else:
                run.measure_group(GROUPS[group]())
    finally:
        stop_all({"engine": [engine]})


def _describe(repetitions: int, most_connections: int) -> dict[str, Any]:
    num_cpus = os.cpu_count() or 1
    cores = (
        f"{num_cpus}. Engine and load generator use the first, a gateway the last, two processes the last 2"
    )
    if num_cpus < 3:
        cores += "; the second process shares its core with engine and load generator"
    return {
        **describe(f"make bench-curves ({repetitions} repetitions after one warm-up)"),
        "cores": cores,
        "idle connections": f"up to {most_connections:,} (10,000, or what the limit of open files allows)",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*GROUPS, IDLE_GROUP]
    parser.add_argument("--only", help=f"comma-separated groups of {', '.join(every)}")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--limit-s", type=int, default=580, help="longest time for all, in seconds")
    parser.add_argument("--name", default="curves", help="name of the result files")
    arguments = parser.parse_args()
    groups = arguments.only.split(",") if arguments.only else every
    if unknown := set(groups) - set(every):
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    counts = allowed_counts()
    with only_run():
        environment = _describe(arguments.repetitions, counts[-1])
        end_cleanly(arguments.limit_s)
        run = CurveRun(arguments.repetitions)
        try:
            measure_groups(run, groups, counts)
        except OutOfTime as error:
            run.absent.append(f"the rest: {error}")
        signal.alarm(0)
    RESULTS.mkdir(parents=True, exist_ok=True)
    stored = {"environment": environment, "absent": run.absent, "curves": run.curves}
    (RESULTS / f"{arguments.name}.json").write_text(json.dumps(stored, indent=1))
    print(write_curves(RESULTS, arguments.name, environment, run.curves, run.absent).read_text())


if __name__ == "__main__":
    main()
