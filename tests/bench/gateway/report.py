"""Tables and a plot of a benchmark run: medians, their range, and every peer as a ratio to Homing."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

REQUEST_COLUMNS = ("1 KB", "16 KB", "128 KB")
GROWING_COLUMNS = ("1 KB growing", "16 KB growing", "128 KB growing")
STREAM_COLUMNS = ("stream", "streams", "stream flood")

Runs = dict[str, dict[str, list[dict[str, Any]]]]  # peer -> scenario -> runs


def median(runs: list[dict[str, Any]], metric: str) -> float | None:
    values = [run[metric] for run in runs if metric in run]
    return statistics.median(values) if values else None


def _cell(runs: list[dict[str, Any]], metric: str, base: float | None, digits: int) -> str:
    values = [run[metric] for run in runs if metric in run]
    if not values:
        return "–"
    middle = statistics.median(values)
    text = f"{middle:,.{digits}f} [{min(values):,.{digits}f}..{max(values):,.{digits}f}]"
    return f"{text} ×{middle / base:.2f}" if base else text


def table(title: str, runs: Runs, columns: tuple[str, ...], metric: str, digits: int = 0) -> list[str]:
    """One metric over scenarios; ×n is the ratio to Homing in the same run."""
    lines = [
        f"### {title}",
        "",
        "| gateway | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for peer, scenarios in runs.items():
        cells = []
        for column in columns:
            is_reference = peer in ("homing", "direct")
            base = None if is_reference else median(runs.get("homing", {}).get(column, []), metric)
            cells.append(_cell(scenarios.get(column, []), metric, base, digits))
        lines.append(f"| {peer} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def added(runs: Runs, metric: str, columns: tuple[str, ...]) -> Runs:
    """The same runs with `metric` less what the engine alone takes."""
    result: Runs = {}
    for peer, scenarios in runs.items():
        if peer == "direct":
            continue
        result[peer] = {}
        for column in columns:
            base = median(runs["direct"].get(column, []), metric) or 0.0
            result[peer][column] = [
                {metric: run[metric] - base} for run in scenarios.get(column, []) if metric in run
            ]
    return result


def failures(runs: Runs) -> list[str]:
    """One line for each run that failed or in which a request did."""
    return [
        f"- {peer}, {scenario}: {run.get('failure') or run}"
        for peer, scenarios in runs.items()
        for scenario, repetitions in scenarios.items()
        for run in repetitions
        if "failure" in run or run["num_bad"] or run["num_errors"]
    ]


def write_report(folder: Path, name: str, environment: dict[str, Any], runs: Runs, absent: list[str]) -> Path:
    """Write `<name>.md` and `<name>.png` into `folder`; return the first."""
    one_client = ("1 KB, one client", "128 KB, one client")
    lines = ["# Gateway benchmark", ""]
    lines += [f"- {key}: {value}" for key, value in environment.items()]
    lines += [f"- not measured: {reason}" for reason in absent]
    lines += ["", "Median [lowest..highest] of the repetitions; ×n is the ratio to Homing.", ""]
    lines += table("CPU µs per request (32 connections)", runs, REQUEST_COLUMNS, "cpu_us_per_request")
    lines += table(
        "CPU µs per request, conversations that grow (mean size)", runs, GROWING_COLUMNS, "cpu_us_per_request"
    )
    lines += table("Requests per second (32 connections, one core)", runs, REQUEST_COLUMNS, "requests_per_s")
    lines += table("CPU µs per event of a stream", runs, STREAM_COLUMNS, "cpu_us_per_event", digits=1)
    lines += table(
        "Added latency, p50 µs (one client)",
        added(runs, "latency_p50_us", one_client),
        one_client,
        "latency_p50_us",
    )
    ttft = ("stream, one client", "stream", "streams")
    lines += table(
        "Added time to the first event, p50 µs",
        added(runs, "first_byte_p50_us", ttft),
        ttft,
        "first_byte_p50_us",
    )
    lines += table("Resident memory after the run, KB", runs, ("streams",), "rss_kb")
    lines += ["### Failed runs and errors", "", *(failures(runs) or ["none"]), ""]
    path = folder / f"{name}.md"
    path.write_text("\n".join(lines))
    _plot(folder / f"{name}.png", runs)
    return path


def _plot(path: Path, runs: Runs) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    panels = (
        (axes[0], REQUEST_COLUMNS, "cpu_us_per_request"),
        (axes[1], STREAM_COLUMNS[:2], "cpu_us_per_event"),
    )
    for axis, columns, metric in panels:
        peers = [peer for peer in runs if peer != "direct"]
        height = 0.8 / len(columns)
        for offset, column in enumerate(columns):
            values = [median(runs[peer].get(column, []), metric) or 0 for peer in peers]
            places = [index + offset * height for index in range(len(peers))]
            axis.barh(places, values, height=height, label=column)
        axis.set_yticks([index + 0.4 - height / 2 for index in range(len(peers))], peers)
        axis.set_xscale("log")
        axis.invert_yaxis()
        axis.set_xlabel("CPU µs per request" if metric == "cpu_us_per_request" else "CPU µs per event")
        axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
