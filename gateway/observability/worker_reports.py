"""`workers: N`: what the other processes have counted, so that each shows the numbers of the whole machine.

Every process writes its numbers into a file of its own, every two seconds and before it shows a page, by
rename, so a reader finds a whole report or an older one. The folder is made by the parent, in memory where
there is such a place, and goes with it.

Invariant: over all pages of all processes a counter never goes backwards, except by what a process that was
killed had counted since its last report. For that, a process that takes a dead one's number begins with its
counts, and nobody shows counts that it has not reported. States of a process that has fallen silent do not
count. Rejected: the files of prometheus_client's multiprocess mode (a write per count, a file per process
id for ever) and asking each other (who asks the dead?).
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
    """What one process says of itself, by the name of the metric."""

    written_s: float  # monotonic, which all processes of a machine share
    counts: _Numbers = {}
    states: _Numbers = {}


_decoder = msgspec.msgpack.Decoder(Report)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A private folder for the reports, as long as the block runs."""
    memory = "/dev/shm"  # noqa: S108 - a private folder is made inside it
    place = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="homing-", dir=place) as folder:
        yield Path(folder)


class WorkerReports:
    """The processes of one machine, as one of them sees them."""

    def __init__(self, folder: Path, number: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = folder / f"{number}.report", clock
        report = _read(self._path)
        self._before: _Numbers = report.counts if report is not None else {}
        self._others: list[Report] = []
        self._read_s = -SILENT_AFTER_S
        self._timer: asyncio.TimerHandle | None = None
        self._families: Callable[[], Iterable[Series[Any]]] = tuple

    def start(self, families: Callable[[], Iterable[Series[Any]]]) -> None:
        """Report these from now on."""
        self._families = families
        self._tick()

    def stop(self) -> None:
        """Leave the counts behind, without states."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._report([one for one in self._with_past(self._families()) if one.kind != "gauge"])

    def add_up(self, families: Iterable[Series[Any]]) -> list[Series[Any]]:
        """Our numbers and everybody's. Reports ours first."""
        mine = self._with_past(families)
        self._report(mine)
        others = self._read_others(max_age_s=0.0)
        return [one.merged([_numbers(report, one) for report in others]) for one in mine]

    def elsewhere(self, name: str) -> list[Mapping[Labels, Any]]:
        """The cells of one metric at our predecessor and at the others, as of a moment ago."""
        others = self._read_others(max_age_s=REPORT_INTERVAL_S / 2)
        return [
            self._before.get(name, {}),
            *(one.counts.get(name) or one.states.get(name, {}) for one in others),
        ]

    def _tick(self) -> None:
        self._report(self._with_past(self._families()))
        self._timer = asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self._tick)

    def _with_past(self, families: Iterable[Series[Any]]) -> list[Series[Any]]:
        return [
            one if one.kind == "gauge" else one.merged([self._before.get(one.name, {})]) for one in families
        ]

    def _report(self, families: Iterable[Series[Any]]) -> None:
        report = Report(written_s=self._clock())
        report.counts, report.states = {}, {}
        for one in families:
            (report.states if one.kind == "gauge" else report.counts)[one.name] = one
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
