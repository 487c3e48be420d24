"""What requests leave behind, entered a little later and together.

What a request leaves behind beyond the counts that the next decision needs (shadow and traffic of the router,
renewal of the binding, metrics, journal, access line) is due soon, not now: the request, or its answer, is on
its way. Done at once it costs twice the CPU, because the code of the next request pushes the code of the last
one out of the processor's caches. So it waits here, in order, and is entered together.

Invariants. Order is kept, and a batch leaves exactly what one by one would have left. Nobody sees a number
before the batch that changes it: the ledger is drained before a full decision, before a session with an ended
turn in it is looked up, before a page or an admin answer, at `MAX_ENTRIES` or `MAX_DELAY_S`, and at the end.
A turn that is traced, or whose stored answer others may ask for, waits for nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from gateway.request.recorder import Recorder
from gateway.request.turn import Turn
from gateway.routing.reservation import Reservation
from gateway.routing.router import Router
from gateway.values import Api, SessionKey

MAX_ENTRIES: Final = 64
"""Larger batches saved no CPU and doubled the p99 of what waits behind them."""
MAX_DELAY_S: Final = 0.025


class Ledger:
    """Belongs to one event loop. `end` and `drain` never raise."""

    def __init__(self, router: Router, recorder: Recorder, *, clock: Callable[[], float]) -> None:
        """Changes: `router` has this drained before it reads what a batch changes."""
        self._router, self._recorder, self._clock = router, recorder, clock
        self._reservations: list[Reservation] = []
        self._turns: list[tuple[Turn, float]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.keys: set[SessionKey] = set()
        """Of the sessions with an ended turn in here."""
        router.drain = self.drain

    def __len__(self) -> int:
        return len(self._reservations)

    def reserve(self, turn: Turn, now_s: float) -> None:
        """Count the turn on the backend that was decided on."""
        placement = turn.placement
        assert placement.decision is not None
        reservation = self._router.note_sent(turn.facts, placement.decision, now_s)
        placement.reservation = reservation
        self._reservations.append(reservation)
        self._drain_soon()

    def release(self, turn: Turn) -> None:
        """Count the turn off its backend, with what its answer has told. Does nothing when it holds none."""
        reservation, turn.placement.reservation = turn.placement.reservation, None
        if reservation is not None:
            outcome = turn.outcome
            self._router.note_ended(reservation, self._clock(), outcome.usage, outcome.is_answered)
            self._reservations.append(reservation)

    def end(self, turn: Turn) -> None:
        """Take in a turn that has ended now."""
        try:
            self.release(turn)
        except Exception as error:
            _log_fault(turn, error)
        self._turns.append((turn, self._clock()))
        if turn.facts.session_key is not None:
            self.keys.add(turn.facts.session_key)
        if turn.trace is not None or turn.is_debug or turn.api is Api.RESPONSES:
            self.drain()
        else:
            self._drain_soon()

    def drain(self) -> None:
        """Enter everything that waits, in order."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        reservations, self._reservations = self._reservations, []
        turns, self._turns = self._turns, []
        self.keys.clear()
        if reservations:
            self._router.take(reservations)
        now_s = self._clock()
        for turn, ended_s in turns:
            try:
                self._recorder.record(turn, ended_s, delay_s=now_s - ended_s)
            except Exception as error:
                _log_fault(turn, error)

    def _drain_soon(self) -> None:
        if len(self._reservations) >= MAX_ENTRIES:
            self.drain()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MAX_DELAY_S, self.drain)


def _log_fault(turn: Turn, error: Exception) -> None:
    logging.getLogger(__name__).error("cannot write down request %s", turn.request_id, exc_info=error)
