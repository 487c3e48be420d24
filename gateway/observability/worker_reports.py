"""`workers: N`: the counts of the other processes, so that each process shows those of the whole machine.

Every process writes its numbers into its own file, every two seconds and before it shows a page, by rename,
so a reader finds a complete report. The parent creates the folder, in memory if possible, and removes it.

Invariant: over all pages of all processes a counter never goes backwards, except by what a killed process had
counted since its last report. For this, a process that replaces a dead one starts with its counts, and no
process shows counts that it has not reported. The states of a process that no longer reports are ignored.
Rejected: prometheus_client's multiprocess mode (a write per count, and files of old process ids that stay)
and asking each other over sockets (a dead process cannot answer, and its counts would be missing).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gateway.observability.logs import log_event
from gateway.observability.series import Labels, Series

REPORT_INTERVAL_S = 2.0
SILENT_AFTER_S = 3 * REPORT_INTERVAL_S

_Numbers = dict[str, dict[Labels, float | list[float]]]


class Report(msgspec.Struct, kw_only=True):
    """The numbers of one process, by metric name."""

    written_s: float  # monotonic, which all processes of a machine share
    counts: _Numbers = {}
    states: _Numbers = {}


_decoder = msgspec.msgpack.Decoder(Report)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Create a private folder for the reports, and remove it after the block."""
    memory = "/dev/shm"  # noqa: S108 - a private folder is made inside it
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="homing-", dir=place) as folder:
        yield Path(folder)


class WorkerReports:
    """The reports of all gateway processes of a machine, as one of the processes sees them."""

    def __init__(self, folder: Path, number: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = folder / f"{number}.report", clock
        report = _read(self._path)
        self._before: _Numbers = report.counts if report is not None else {}
        self._others: list[Report] = []
        self._read_s = -SILENT_AFTER_S
        self._timer: asyncio.TimerHandle | None = None
        self._families: Callable[[], Iterable[Series[Any]]] = tuple

    def start(self, families: Callable[[], Iterable[Series[Any]]]) -> None:
        """Start to report these."""
        self._families = families
        self._tick()

    def stop(self) -> None:
        """Write a last report, without states."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._report([family for family in self._with_past(self._families()) if family.kind != "gauge"])

    def add_up(self, families: Iterable[Series[Any]]) -> list[Series[Any]]:
        """Return our numbers merged with all others. Reports ours first."""
        mine = self._with_past(families)
        self._report(mine)
        others = self._read_others(max_age_s=0.0)
        return [family.merged([_numbers(report, family) for report in others]) for family in mine]

    def elsewhere(self, name: str) -> list[Mapping[Labels, Any]]:
        """Return one metric's cells of our predecessor and of the others, at most a second old."""
        others = self._read_others(max_age_s=REPORT_INTERVAL_S / 2)
        return [
            self._before.get(name, {}),
            *(report.counts.get(name) or report.states.get(name, {}) for report in others),
        ]

    def _tick(self) -> None:
        self._report(self._with_past(self._families()))
        self._timer = asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self._tick)

    def _with_past(self, families: Iterable[Series[Any]]) -> list[Series[Any]]:
        return [
            family if family.kind == "gauge" else family.merged([self._before.get(family.name, {})])
            for family in families
        ]

    def _report(self, families: Iterable[Series[Any]]) -> None:
        report = Report(written_s=self._clock())
        report.counts, report.states = {}, {}
        for family in families:
            (report.states if family.kind == "gauge" else report.counts)[family.name] = family
        draft = self._path.with_suffix(".draft")
        try:
            draft.write_bytes(msgspec.msgpack.encode(report))
            draft.rename(self._path)
        except OSError as error:
            log_event("metrics_not_shared", level=logging.WARNING, reason=str(error))

    def _read_others(self, *, max_age_s: float) -> list[Report]:
        now_s = self._clock()
        if now_s - self._read_s >= max_age_s:
            paths = sorted(self._path.parent.glob("*.report"))
            read = [_read(path) for path in paths if path != self._path]
            self._others = [report for report in read if report is not None]
            for report in self._others:
                if now_s - report.written_s > SILENT_AFTER_S:
                    report.states = {}
            self._read_s = now_s
        return self._others


def _numbers(report: Report, family: Series[Any]) -> Mapping[Labels, Any]:
    return (report.states if family.kind == "gauge" else report.counts).get(family.name, {})


def _read(path: Path) -> Report | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return _decoder.decode(path.read_bytes())
    return None
