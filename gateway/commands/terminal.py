"""Output of commands: tables and numbers. Colours only on a terminal, and never with NO_COLOR.

Names come from configurations, engines and clients. They are never read as markup, and control characters,
which could rewrite the screen, are shown as dots.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

STATE_COLOURS = {
    "ready": "green",
    "joining": "yellow",
    "degraded": "yellow",
    "draining": "yellow",
    "cordoned": "cyan",
    "sleeping": "blue",
    "down": "red",
}
ABSENT = "–"


def console() -> Console:
    """Standard output, as wide as the terminal; 120 columns if it is a file or a pipe."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=120)


def plain(value: object) -> Text:
    """Any value as plain text, without markup or control characters."""
    text = ABSENT if value is None else str(value)
    return Text("".join(char if char.isprintable() else "·" for char in text))


def state(name: str) -> Text:
    found = plain(name)
    found.stylize(STATE_COLOURS.get(name, "white"))
    return found


def share(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"


def count(value: float | None) -> str:
    """`1,234`, `12.3k`, `4.5M`."""
    if value is None:
        return ABSENT
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{value:,.0f}"


def ago(wall_s: float | None) -> str:
    if wall_s is None:
        return ABSENT
    passed_s = max(0.0, time.time() - wall_s)
    for limit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if passed_s >= limit_s:
            return f"{passed_s / limit_s:.0f} {unit} ago"
    return f"{passed_s:.0f} s ago"


def table(*columns: str, title: str | None = None) -> Table:
    """Return an empty table. Columns whose name starts with `>` are right-aligned."""
    found = Table(
        box=None, header_style="bold", pad_edge=False, title=title, title_justify="left", title_style="bold"
    )
    for name in columns:
        is_number = name.startswith(">")
        found.add_column(name.removeprefix(">"), justify="right" if is_number else "left", overflow="fold")
    return found


def add_row(to: Table, cells: Sequence[object]) -> None:
    to.add_row(*(cell if isinstance(cell, Text) else plain(cell) for cell in cells))
