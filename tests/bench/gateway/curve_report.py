"""Tables and small multiples of `curves.py`: medians and their range, one panel per curve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from bench.gateway.report import Runs, failures, median, table
from matplotlib.axes import Axes

Curves = dict[str, Runs]  # curve -> series -> x -> runs

COLOURS = {
    "homing": "#c23b22",
    "homing in slow start": "#e9967a",
    "vllm-router consistent_hash": "#1f5fa8",
    "nginx hash": "#5f9e4f",
    "access log": "#b9a6d3",
    "100 tenants, limits": "#e0b04c",
    "admin, journal": "#7fb3bd",
    "sessions in Redis": "#6e6e6e",
}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One metric of one curve."""

    curve: str
    metric: str
    title: str
    x_label: str
    digits: int = 0
    is_numeric: bool = True  # points on an axis, or else names under bars
    is_log: bool = False  # the values


PANELS = (
    Panel(
        curve="backends",
        metric="cpu_us_per_request",
        title="CPU µs per request, bound sessions, 1 KB",
        x_label="backends",
    ),
    Panel(
        curve="backends, new sessions",
        metric="cpu_us_per_request",
        title="CPU µs per request, new sessions, 1 KB",
        x_label="backends",
    ),
    Panel(
        curve="backends, no requests",
        metric="idle_ms_per_s",
        title="CPU ms per s without requests",
        x_label="backends",
        digits=1,
    ),
    Panel(
        curve="messages",
        metric="cpu_us_per_request",
        title="CPU µs per request, 64 KB",
        x_label="messages in the body",
    ),
    Panel(
        curve="bytes",
        metric="cpu_us_per_request",
        title="CPU µs per request",
        x_label="KB of the body",
        is_log=True,
    ),
    Panel(
        curve="streams",
        metric="cpu_us_per_event",
        title="CPU µs per event, 10 events/s each",
        x_label="concurrent streams",
        digits=1,
    ),
    Panel(
        curve="idle connections",
        metric="kb_per_connection",
        title="KB of memory per idle connection",
        x_label="idle connections",
        digits=1,
    ),
    Panel(
        curve="processes",
        metric="requests_per_s",
        title="Requests per second, 1 KB",
        x_label="processes",
        is_numeric=False,
    ),
    Panel(
        curve="processes",
        metric="cpu_us_per_request",
        title="CPU µs per request, 1 KB",
        x_label="processes",
        is_numeric=False,
    ),
    Panel(
        curve="options",
        metric="cpu_us_per_request",
        title="CPU µs per request with one option each",
        x_label="load",
        is_numeric=False,
    ),
)


def write_curves(
    folder: Path, name: str, environment: dict[str, Any], curves: Curves, absent: list[str]
) -> Path:
    """Write `<name>.md` and `<name>.png` into `folder`; return the first."""
    lines = ["# How the gateway's cost grows", ""]
    lines += [f"- {key}: {value}" for key, value in environment.items()]
    lines += [f"- not measured: {reason}" for reason in absent]
    lines += ["", "Median [lowest..highest] of the repetitions; ×n is the ratio to `homing`.", ""]
    for panel in PANELS:
        runs = curves.get(panel.curve)
        if runs:
            title = f"{panel.title}, by {panel.x_label}"
            lines += table(title, runs, tuple(_values_of_x(runs)), panel.metric, panel.digits)
    failed = [f"{line} ({curve})" for curve, runs in curves.items() for line in failures(runs)]
    lines += ["### Failed runs and errors", "", *(failed or ["none"]), ""]
    path = folder / f"{name}.md"
    path.write_text("\n".join(lines))
    _plot(folder / f"{name}.png", curves)
    return path


def _values_of_x(runs: Runs) -> list[str]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(x for points in runs.values() for x in points))


def _plot(path: Path, curves: Curves) -> None:
    shown = [panel for panel in PANELS if panel.curve in curves]
    num_columns = min(5, len(shown)) or 1
    num_rows = -(-len(shown) // num_columns) or 1
    size = (3.8 * num_columns, 3.4 * num_rows)
    figure, axes = plt.subplots(num_rows, num_columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.axis("off")
    for axis, panel in zip(axes.flat, shown, strict=False):
        draw = _draw_lines if panel.is_numeric else _draw_bars
        draw(axis, panel, curves[panel.curve])
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(panel.x_label, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _points(panel: Panel, points: dict[str, list[dict[str, Any]]], xs: list[str]) -> list[list[float]]:
    """Places, medians, and how far the range goes below and above them, of the `xs` that were measured."""
    found = []
    for place, x in enumerate(xs):
        values = [run[panel.metric] for run in points.get(x, []) if panel.metric in run]
        middle = median(points.get(x, []), panel.metric)
        if middle is not None:
            at = float(x) if panel.is_numeric else float(place)
            found.append((at, middle, middle - min(values), max(values) - middle))
    return [list(column) for column in zip(*found, strict=True)] or [[], [], [], []]


def _draw_lines(axis: Axes, panel: Panel, runs: Runs) -> None:
    xs = _values_of_x(runs)
    for series, points in runs.items():
        places, middles, below, above = _points(panel, points, xs)
        axis.errorbar(
            places,
            middles,
            yerr=[below, above],
            label=series,
            marker="o",
            markersize=4,
            capsize=2,
            color=COLOURS.get(series),
        )
        if series == "homing":
            _annotate(axis, panel, places, middles)
    axis.set_xscale("log")
    axis.set_xticks([float(x) for x in xs], [f"{int(x):,}" for x in xs])
    axis.minorticks_off()
    if panel.is_log:
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0, top=axis.get_ylim()[1] * 1.3)  # room for the legend


def _annotate(axis: Axes, panel: Panel, places: list[float], values: list[float]) -> None:
    for place, value in zip(places, values, strict=True):
        text, offset = f"{value:,.{panel.digits}f}", (0, 5)
        axis.annotate(
            text, (place, value), xytext=offset, textcoords="offset points", fontsize=7, ha="center"
        )


def _draw_bars(axis: Axes, panel: Panel, runs: Runs) -> None:
    xs = _values_of_x(runs)
    width = 0.8 / len(runs)
    for offset, (series, points) in enumerate(runs.items()):
        places, middles, below, above = _points(panel, points, xs)
        left = [place + (offset - (len(runs) - 1) / 2) * width for place in places]
        colour = COLOURS.get(series)
        bars = axis.bar(left, middles, width, yerr=[below, above], capsize=2, label=series, color=colour)
        axis.bar_label(bars, fmt="{:,.0f}", fontsize=6, padding=2)
    axis.set_xticks(range(len(xs)), xs)
    axis.set_ylim(top=axis.get_ylim()[1] * 1.4)
