"""Tables and the turn curve of an engine benchmark: medians, their range, every engine as a ratio to ours.

An engine that was not run is a line with its reason, never a missing line. Imports nothing of the benchmark.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS, OURS_WITHOUT = "homing", "homing without reuse"
Measured = dict[str, Any]  # wall_s, cpu_s, num_tokens, num_cached_tokens
Metric = Callable[[Measured], float]


@dataclass(slots=True, kw_only=True)
class Results:
    """All that a run found; grows while it runs."""

    environment: dict[str, str]
    absent: dict[str, str]  # engine -> why it was not run, or not to the end
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)  # engine -> what it said of itself
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)  # in the order of the tables
    runs: dict[str, dict[str, list[Measured]]] = field(default_factory=dict)  # engine -> step -> repetitions
    bytes_per_s: list[float] = field(default_factory=list)  # memory bandwidth, per repetition
    weight_bytes: int = 0  # of our model as computed, what one decode step reads
    num_repetitions: int = 0

    def note(self, name: str, kind: str, prompts: list[list[int]], history: list[int] | None) -> None:
        """Remember what a step is. Changes: `steps`."""
        num_tokens = len(prompts[0])
        self.steps[name] = {
            "kind": kind,
            "num_sequences": len(prompts),
            "num_prompt_tokens": num_tokens,
            "num_new_tokens": num_tokens - len(history or ()),
        }

    def names_of(self, *kinds: str) -> list[str]:
        return [name for name, step in self.steps.items() if step["kind"] in kinds]

    def median(self, engine: str, step: str, metric: Metric) -> float | None:
        values = [metric(measured) for measured in self.runs.get(engine, {}).get(step, [])]
        return statistics.median(values) if values else None


def speed(measured: Measured) -> float:
    """Tokens per second of wall time."""
    return float(measured["num_tokens"] / measured["wall_s"])


def cpu_ms_per_token(measured: Measured) -> float:
    return float(measured["cpu_s"] * 1e3 / measured["num_tokens"])


def wall_ms(measured: Measured) -> float:
    return float(measured["wall_s"] * 1e3)


def cpu_ms(measured: Measured) -> float:
    return float(measured["cpu_s"] * 1e3)


def write_report(folder: Path, name: str, results: Results) -> Path:
    """Write `<name>.json`, `<name>.md` and `<name>_ttft.png` into `folder`; return the second."""
    (folder / f"{name}.json").write_text(json.dumps(asdict(results), indent=1) + "\n")
    speeds, turns = results.names_of("prefill", "decode"), results.names_of("ttft")
    sections = [
        _heading(results),
        _table("Tokens per second", results, speeds, speed, digits=1),
        _table("CPU ms per token", results, speeds, cpu_ms_per_token, digits=2),
        _floor(results),
        _start_and_memory(results),
        _turn_sizes(results, turns),
        _table("Time to first token, ms", results, turns, wall_ms),
        _table("Time to first token, CPU ms", results, turns, cpu_ms),
        _reuse(results, turns),
        ["### Turn by turn", "", f"![time to first token by turn]({name}_ttft.png)", ""],
    ]
    path = folder / f"{name}.md"
    path.write_text("\n".join(line for section in sections for line in section))
    plot_turns(folder / f"{name}_ttft.png", results)
    return path


def _heading(results: Results) -> list[str]:
    lines = ["# Engine benchmark", ""]
    lines += [f"- {key}: {value}" for key, value in results.environment.items()]
    lines += [f"- {engine}: {fact['version']}, {fact['weights']}" for engine, fact in results.facts.items()]
    lines += [f"- not run here: {engine}: {reason}" for engine, reason in results.absent.items()]
    return [
        *lines,
        "",
        f"Median [lowest..highest] of {results.num_repetitions} repetitions, each of which goes through all "
        "engines step by step; ×n is the ratio to homing. CPU time is that of the engine's whole process: it "
        "suffers less than wall time from other programs. A dash: not measured, because the engine computes "
        "one sequence at a time, or would take most of the run.",
        "",
    ]


def _table(title: str, results: Results, columns: list[str], metric: Metric, digits: int = 0) -> list[str]:
    rows = []
    for engine in results.facts:
        steps = results.runs.get(engine, {})
        if not any(column in steps for column in columns):
            continue
        cells = []
        for column in columns:
            base = None if engine == OURS else results.median(OURS, column, metric)
            cells.append(_cell([metric(measured) for measured in steps.get(column, [])], base, digits))
        rows.append(f"| {engine} | " + " | ".join(cells) + " |")
    missing = [engine for engine in results.absent if engine not in results.facts]
    rows += [f"| {engine} |" + " not run |" * len(columns) for engine in missing]
    head = ["| engine | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    return [f"### {title}", "", *head, *rows, ""]


def _cell(values: list[float], base: float | None, digits: int) -> str:
    if not values:
        return "–"
    middle = statistics.median(values)
    text = f"{middle:,.{digits}f} [{min(values):,.{digits}f}..{max(values):,.{digits}f}]"
    return f"{text} ×{middle / base:.2f}" if base else text


def _floor(results: Results) -> list[str]:
    """How far decoding is from reading all weights once per step at the memory's speed."""
    if not results.bytes_per_s or OURS not in results.runs:
        return []
    bytes_per_s = statistics.median(results.bytes_per_s)
    floor_s = results.weight_bytes / bytes_per_s
    lines = [
        "### Floor of decoding",
        "",
        f"A decode step reads {results.weight_bytes / 1e6:,.0f} MB of weights; one pass over memory ran at "
        f"{bytes_per_s / 1e9:.1f} GB/s [{min(results.bytes_per_s) / 1e9:.1f}.."
        f"{max(results.bytes_per_s) / 1e9:.1f}] in this run: at least {floor_s * 1e3:.1f} ms per step.",
        "",
    ]
    for name in results.names_of("decode"):
        rate = results.median(OURS, name, speed)
        if rate is not None:
            floor_rate = results.steps[name]["num_sequences"] / floor_s
            lines.append(
                f"- {name}: {rate:.1f} of {floor_rate:.1f} tokens/s, {rate / floor_rate:.0%} of the floor"
            )
    return [*lines, ""]


def _start_and_memory(results: Results) -> list[str]:
    """What it takes to have the model, and the most memory that the engine's process ever held."""
    rows = []
    for engine, facts in results.facts.items():
        peaks = [run["peak_bytes"] for step in results.runs.get(engine, {}).values() for run in step]
        if peaks and "load_s" in facts:
            rows.append(
                f"| {engine} | {facts['load_s']:.2f} | {facts['load_cpu_s']:.2f} | {max(peaks) / 1e6:,.0f} |"
            )
    head = ["| engine | load, s | load, CPU s | peak resident MB |", "|---|---|---|---|"]
    note = (
        "Load: from an interpreter that has imported what the engine's program names to the first request; "
    )
    note += "resident: with the KV of this run's requests, mapped files included."
    return ["### Start and memory", "", note, "", *head, *rows, ""] if rows else []


def _turn_sizes(results: Results, turns: list[str]) -> list[str]:
    rows = []
    for label, key in (("prompt tokens", "num_prompt_tokens"), ("of these new", "num_new_tokens")):
        rows.append(f"| {label} | " + " | ".join(str(results.steps[turn][key]) for turn in turns) + " |")
    computed = []
    for turn in turns:
        measured = results.runs.get(OURS, {}).get(turn, [])
        left = [run["num_tokens"] - run["num_cached_tokens"] for run in measured]
        computed.append(f"{statistics.median(left):.0f}" if left else "–")
    rows.append("| computed by homing (whole blocks are reused) | " + " | ".join(computed) + " |")
    head = ["| | " + " | ".join(turns) + " |", "|---" * (len(turns) + 1) + "|"]
    return ["### The chat", "", *head, *rows, ""]


def _reuse(results: Results, turns: list[str]) -> list[str]:
    rows = []
    for label, metric in (("wall", wall_ms), ("CPU", cpu_ms)):
        cells = [
            _ratio(results.median(OURS_WITHOUT, turn, metric), results.median(OURS, turn, metric))
            for turn in turns
        ]
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    if all(cell == "–" for cell in cells):
        return []
    head = ["| without ÷ with | " + " | ".join(turns) + " |", "|---" * (len(turns) + 1) + "|"]
    lines = ["### What reuse saves", "", *head, *rows, ""]
    chat = [turn for turn in turns if turn.startswith("turn ")]
    if len(chat) > 2:
        second, last = chat[1], chat[-1]
        for engine in (OURS, OURS_WITHOUT):
            growth = [
                _ratio(results.median(engine, last, metric), results.median(engine, second, metric))
                for metric in (wall_ms, cpu_ms)
            ]
            lines.append(f"- {engine}: {last} ÷ {second} = {growth[0]} (wall), {growth[1]} (CPU)")
        lines.append("")
    return lines


def _ratio(numerator: float | None, denominator: float | None) -> str:
    return "–" if numerator is None or not denominator else f"{numerator / denominator:.2f}"


def plot_turns(path: Path, results: Results) -> None:
    """Draw time to first token by turn: median as a line, lowest to highest as a band."""
    turns = [turn for turn in results.names_of("ttft") if turn.startswith("turn ")]
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for engine in results.facts:
        steps = results.runs.get(engine, {})
        values = [[wall_ms(measured) for measured in steps.get(turn, [])] for turn in turns]
        if not all(values):
            continue
        places = range(len(turns))
        (line,) = axis.plot(places, [statistics.median(value) for value in values], "o-", label=engine)
        lows, highs = [min(value) for value in values], [max(value) for value in values]
        axis.fill_between(places, lows, highs, alpha=0.2, color=line.get_color())
    labels = [f"{turn}\n{results.steps[turn]['num_prompt_tokens']} tokens" for turn in turns]
    axis.set_xticks(range(len(turns)), labels)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("time to first token, ms")
    axis.set_title("A growing chat: the history is recomputed, or reused")
    if axis.lines:
        axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
