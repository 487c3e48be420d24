"""The acceptance grid of placement: every policy on every scenario, size, cache and load.

`python -m gateway.replay.grid` writes `routing.json`, `routing.md` and `routing.png`. *Regret* is a policy's
mean TTFT over the best of all policies in the same cell. Rivals get exact cache content (what engine events
would tell them, without delay); `homing` runs twice, with that and with gateway knowledge alone. Finished
cells are kept in `routing.cells.jsonl` and not run again, so that a grid that was stopped can continue.

A cell runs only if its trace slice is present. The result names the cells that did not run.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec

from gateway.replay.measures import Measures, measure
from gateway.replay.plot import plot_regret
from gateway.replay.scenarios import make_scenario, seconds_per_token
from gateway.replay.simulator import simulate
from gateway.replay.trace import unbounded_hits
from gateway.routing.settings import POLICY_NAMES, RoutingSettings

GATEWAY_ONLY = "homing (gateway knowledge)"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration in the grid."""

    scenario: str
    num_engines: int
    cache: str
    load: str

    @property
    def label(self) -> str:
        return f"{self.scenario} N={self.num_engines} {self.cache} {self.load}"


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """The results of every policy in one cell."""

    cell: Cell
    prefill_tokens_per_s: float
    measures: list[Measures]


def standard_cells() -> list[Cell]:
    """Return the cells of the acceptance test, those with eight engines first."""

    def at_eight(scenario: str, cache: str, *loads: str) -> list[Cell]:
        return [Cell(scenario=scenario, num_engines=8, cache=cache, load=load) for load in loads]

    # chats and apps fit any cache, so a load relative to affinity would need absurdly slow engines
    cells = at_eight("conversation", "medium", "rr90")
    cells += [*at_eight("chat", "medium", "rr90"), *at_eight("apps", "medium", "rr90")]
    for load in ("aff70", "rr90", "aff90"):
        for scenario in ("documents", "agent", "conversation"):
            cells += at_eight(scenario, "medium", load)
    for cache in ("small", "large"):
        cells += at_eight("chat", cache, "rr90")
        for scenario in ("conversation", "documents", "agent"):
            cells += at_eight(scenario, cache, "aff70", "rr90", "aff90")
    cells += [*at_eight("chat", "medium", "rr70"), *at_eight("conversation", "medium", "rr70")]
    for num_engines in (4, 16):
        for scenario, load in (
            ("conversation", "rr90"),
            ("conversation", "aff70"),
            ("agent", "aff70"),
            ("documents", "rr90"),
            ("chat", "rr90"),
        ):
            cells.append(Cell(scenario=scenario, num_engines=num_engines, cache="medium", load=load))
    cells.append(Cell(scenario="conversation", num_engines=64, cache="medium", load="rr90"))
    cells += [*at_eight("ramp", "medium", "rr90"), *at_eight("ramp", "small", "rr90")]
    for scenario in ("light_agents", "light_forks", "light_slots"):
        cells += [*at_eight(scenario, "small", "rr2"), *at_eight(scenario, "medium", "rr2")]
    return list(dict.fromkeys(cells))


def run_cell(cell: Cell, traces: Path) -> CellResult:
    """Run every policy on one cell."""
    scenario = make_scenario(cell.scenario, cell.num_engines, traces)
    bound = unbounded_hits(scenario.trace)
    cost = seconds_per_token(scenario, cache=cell.cache, load=cell.load)
    runs = [(name, name, "exact") for name in POLICY_NAMES] + [(GATEWAY_ONLY, "homing", "gateway")]
    measures = []
    for label, policy, knowledge in runs:
        plan = scenario.plan(
            cache=cell.cache, s_per_token=cost, routing=RoutingSettings(policy=policy), knowledge=knowledge
        )
        measures.append(measure(simulate(scenario.trace, plan, scenario.facts), bound, label=label))
    return CellResult(cell=cell, prefill_tokens_per_s=1.0 / cost, measures=measures)


def regrets(results: Iterable[CellResult]) -> dict[str, list[float]]:
    """Return each policy's regret in every cell. The best is taken over all policies and knowledge."""
    found: dict[str, list[float]] = defaultdict(list)
    for result in results:
        best = min(measures.ttft_mean_s for measures in result.measures)
        for measures in result.measures:
            found[measures.policy].append(measures.ttft_mean_s / best)
    return dict(found)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values)) if values else math.nan


def report(results: list[CellResult], missing: list[Cell]) -> str:
    """Return the results as Markdown."""
    table = regrets(results)
    lines = [
        "# Routing quality, simulated",
        "",
        f"{len(results)} cells; command `python -m gateway.replay.grid`. Regret: mean TTFT over",
        "that of the best policy in the same cell. Rivals see exact cache content;",
        "`homing (gateway knowledge)` does not.",
        "",
        "| policy | regret, geometric mean | worst | cells best or within 5 % |",
        "|---|---|---|---|",
    ]
    for policy, values in sorted(table.items(), key=lambda item: geometric_mean(item[1])):
        near = sum(value <= 1.05 for value in values)
        lines.append(
            f"| {policy} | {geometric_mean(values):.2f} | {max(values):.2f} | {near} of {len(values)} |"
        )
    for result in results:
        lines += ["", f"## {result.cell.label} ({result.prefill_tokens_per_s:,.0f} tok/s per engine)", ""]
        lines += ["| policy | hit of bound | TTFT mean | p50 | p99 s | busiest/mean per min | moved |"]
        lines += ["|---|---|---|---|---|---|---|"]
        lines += [
            f"| {m.policy} | {m.hit_of_bound:.3f} | {m.ttft_mean_s:.3f} | {m.ttft_p50_s:.3f} "
            f"| {m.ttft_p99_s:.2f} | {m.balance_per_minute:.2f} | {m.moved:.3f} |"
            for m in result.measures
        ]
    if missing:
        lines += [
            "",
            "Not run, because their traces are missing: " + "; ".join(cell.label for cell in missing),
        ]
    return "\n".join(lines) + "\n"


def _run(job: tuple[Cell, Path]) -> CellResult | Cell:
    try:
        return run_cell(*job)
    except FileNotFoundError:
        return job[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gateway.replay.grid", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--traces", type=Path, default=Path("../shared/traces"), help="folder of trace slices"
    )
    parser.add_argument("--out", type=Path, default=Path("tests/bench/results"), help="where to write")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--report-only", action="store_true", help="run nothing, only report finished cells")
    parser.add_argument("--limit", type=int, default=None, help="run only the first cells")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "routing.cells.jsonl"
    lines = kept.read_bytes().splitlines() if kept.exists() else []
    done = {result.cell: result for line in lines if (result := msgspec.json.decode(line, type=CellResult))}
    wanted = standard_cells()[: options.limit]
    jobs = [] if options.report_only else [(cell, options.traces) for cell in wanted if cell not in done]
    missing: list[Cell] = []
    with multiprocessing.Pool(options.processes) as pool, kept.open("ab") as file:
        for outcome in pool.imap(_run, jobs):
            if isinstance(outcome, Cell):
                missing.append(outcome)
                continue
            done[outcome.cell] = outcome
            file.write(msgspec.json.encode(outcome) + b"\n")
            file.flush()
            print(outcome.cell.label, f"{len(done)}/{len(wanted)}", file=sys.stderr)
    results = [done[cell] for cell in wanted if cell in done]
    (options.out / "routing.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    (options.out / "routing.md").write_text(report(results, missing))
    plot_regret(regrets(results), options.out / "routing.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
