"""Counters, gauges and histograms as plain dicts from label values to numbers, and how to merge them.

A request touches a dozen of these, so counting is one dict operation: `metrics.requests[api, status] += 1.0`
(0.1 µs; a child of prometheus_client costs 0.4-1.4 µs and a lock). No locks are needed because only the event
loop's thread counts and reads. A key is the label value if there is one label, a tuple if there are several,
and `()` if there is none.

Invariant: reading never creates a series. Does not know which metrics exist (`metrics`), what the page looks
like (`exposition`), or whose numbers are merged (`worker_reports`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

Labels = str | tuple[str, ...]
_Cell = TypeVar("_Cell", float, list[float])


class Series(dict[Labels, _Cell]):
    """All series of one metric."""

    kind: ClassVar[Literal["counter", "gauge", "histogram"]]
    is_summed = True  # over processes: the sum, otherwise the maximum

    def __init__(self, name: str, text: str, *labels: str) -> None:
        super().__init__()
        self.name, self.text, self.labels = name, text, labels

    def merged(self, others: Iterable[Mapping[Labels, Any]]) -> Self:
        """Return this metric merged with the cells of other processes. Changes nothing."""
        total = self._empty()
        total.update(self)
        for cells in others:
            for key, cell in cells.items():
                known = total.get(key)
                total[key] = cell if known is None else self._combine(known, cell)
        return total

    def keep_backends(self, backend_ids: Collection[str]) -> None:
        """Drop the series of backends that have left, if the first label is `backend`."""
        if self.labels[:1] == ("backend",):
            for key in [key for key in self if (key if isinstance(key, str) else key[0]) not in backend_ids]:
                del self[key]

    def _empty(self) -> Self:
        return type(self)(self.name, self.text, *self.labels)

    def _combine(self, one: _Cell, other: _Cell) -> _Cell:
        raise NotImplementedError


class Counter(Series[float]):
    """Only grows. `name` is without the `_total` of the exposed name."""

    kind = "counter"

    def __missing__(self, key: Labels) -> float:
        return 0.0

    def by_label(self, position: int = 0) -> dict[str, float]:
        """Return the sums by the value of one label."""
        sums: dict[str, float] = {}
        for key, number in self.items():
            value = key if isinstance(key, str) else key[position]
            sums[value] = sums.get(value, 0.0) + number
        return sums

    def _combine(self, one: float, other: float) -> float:
        return one + other


class Gauge(Series[float]):
    """A state, created anew for each page."""

    kind = "gauge"

    def __init__(self, name: str, text: str, *labels: str, is_summed: bool = False) -> None:
        super().__init__(name, text, *labels)
        self.is_summed = is_summed

    def _empty(self) -> Gauge:
        return Gauge(self.name, self.text, *self.labels, is_summed=self.is_summed)

    def _combine(self, one: float, other: float) -> float:
        return one + other if self.is_summed else max(one, other)


class Exemplar(NamedTuple):
    """One observation with its trace."""

    trace_id: str
    value: float
    wall_s: float


class Histogram(Series[list[float]]):
    """Observations by size. A row is [ count per bucket … | count above the last bound | sum ]."""

    kind = "histogram"

    def __init__(self, name: str, text: str, *labels: str, bounds: tuple[float, ...]) -> None:
        super().__init__(name, text, *labels)
        self.bounds = bounds
        self.exemplars: dict[tuple[Labels, int], Exemplar] = {}  # the last one of each bucket

    def observe(self, value: float, labels: Labels = ()) -> None:
        row = self.get(labels)
        if row is None:
            row = self[labels] = [0.0] * (len(self.bounds) + 2)
        row[bisect_left(self.bounds, value)] += 1.0
        row[-1] += value

    def remember(self, value: float, labels: Labels, trace_id: str, wall_s: float) -> None:
        """Keep an observation as the exemplar of its bucket, instead of the last one."""
        self.exemplars[labels, bisect_left(self.bounds, value)] = Exemplar(trace_id, value, wall_s)

    def _empty(self) -> Histogram:
        empty = Histogram(self.name, self.text, *self.labels, bounds=self.bounds)
        empty.exemplars = self.exemplars
        return empty

    def _combine(self, one: list[float], other: list[float]) -> list[float]:
        return [mine + theirs for mine, theirs in zip(one, other, strict=True)]
