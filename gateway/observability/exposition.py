"""The page for Prometheus, in its text format 0.0.4 or, if the scraper asks for it, in OpenMetrics 1.0.

Written here because prometheus_client takes 16 µs per line: for a fleet of a thousand backends it would block
all requests for a quarter of a second. The tests parse the page with that library's own parsers. Every label
value goes through `_escape`, so that a hostile name cannot forge a line.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.observability.series import Exemplar, Histogram, Labels, Series

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def content_type_for(accept: str) -> str:
    """Return the format for this Accept header; only OpenMetrics has exemplars."""
    return OPEN_METRICS if "application/openmetrics-text" in accept.lower() else TEXT


def render(families: Iterable[Series[Any]], content_type: str) -> bytes:
    """Render the whole page. O(series)."""
    is_open = content_type == OPEN_METRICS
    lines: list[str] = []
    for family in families:
        suffix = "_total" if family.kind == "counter" else ""
        titled = family.name if is_open else family.name + suffix
        lines.append(f"# HELP {titled} {_escape(family.text)}")
        lines.append(f"# TYPE {titled} {family.kind}")
        if isinstance(family, Histogram):
            lines += _histogram_lines(family, is_open)
        else:
            name = family.name + suffix
            lines += [
                f"{name}{{{_pairs(family, key)}}} {float(number)!r}" if key else f"{name} {float(number)!r}"
                for key, number in family.items()
            ]
    if is_open:
        lines.append("# EOF")
    lines.append("")
    return "\n".join(lines).encode()


def _histogram_lines(family: Histogram, is_open: bool) -> Iterable[str]:
    """Buckets are cumulative on the page but not in the row."""
    bounds = [*map(repr, family.bounds), "+Inf"]
    for key, row in family.items():
        pairs = _pairs(family, key)
        opening = f"{family.name}_bucket{{{pairs}{',' if pairs else ''}le="
        count = 0.0
        for place, bound in enumerate(bounds):
            count += row[place]
            exemplar = family.exemplars.get((key, place)) if is_open else None
            yield f'{opening}"{bound}"}} {count!r}{_exemplar_text(exemplar)}'
        labels = f"{{{pairs}}}" if pairs else ""
        yield f"{family.name}_count{labels} {count!r}"
        yield f"{family.name}_sum{labels} {row[-1]!r}"


def _exemplar_text(exemplar: Exemplar | None) -> str:
    if exemplar is None:
        return ""
    return f' # {{trace_id="{_escape(exemplar.trace_id)}"}} {exemplar.value!r} {exemplar.wall_s:.3f}'


def _pairs(family: Series[Any], key: Labels) -> str:
    if isinstance(key, str):
        return f'{family.labels[0]}="{_escape(key)}"'
    return ",".join([f'{name}="{_escape(value)}"' for name, value in zip(family.labels, key, strict=True)])


def _escape(text: str) -> str:
    if text.isalnum():  # nearly all are, and this check is cheaper than three replacements
        return text
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
