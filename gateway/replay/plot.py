"""Plots of simulation results, if matplotlib is installed (`pip install homing[plot]`).

Without matplotlib nothing is drawn, and the caller is told.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway.replay.measures import Measures


def plot_regret(regrets: Mapping[str, Sequence[float]], path: Path) -> bool:
    """Draw each policy's regrets over all cells as a box, best median first. False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    names = sorted(regrets, key=lambda name: statistics.median(regrets[name]), reverse=True)
    figure = Figure(figsize=(8, 0.45 * len(names) + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.boxplot([list(regrets[name]) for name in names], orientation="horizontal", whis=(0, 100))
    axes.set_yticks(range(1, len(names) + 1), names)
    axes.set_xscale("log")
    axes.set_xlabel("mean time to first token, relative to the best policy of the same cell")
    axes.grid(visible=True, axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    return True


def plot_policies(measures: Sequence[Measures], path: Path) -> bool:
    """Draw hit rate against mean TTFT, one point per policy. False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for item in measures:
        axes.scatter(item.hit_of_bound, item.ttft_mean_s)
        axes.annotate(
            item.policy, (item.hit_of_bound, item.ttft_mean_s), textcoords="offset points", xytext=(4, 4)
        )
    axes.set_yscale("log")
    axes.set_xlabel("cached prompt tokens, share of what an unbounded cache would have")
    axes.set_ylabel("mean time to first token, s")
    axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=120)
    return True
