"""Turns that have ended and are not yet written down.

What a finished request leaves behind (its release in the router, the binding's renewal, metrics, journal,
access line) is due soon, not now: the answer is on its way. Done at once it costs twice the CPU, because the
code of the next request has pushed the code of the last one out of the processor's caches. So finished turns
wait here, in order, and are written down together.

Invariants. Order is kept, and a batch leaves exactly what one by one would have left. Nobody sees a number
before the batch that changes it: the ledger is drained before a full decision, before a session with a turn
in it is looked up, before a page or an admin answer, at `MAX_TURNS` turns or `MAX_DELAY_S` seconds, and at
the end. A turn that is traced, or whose stored answer others may ask for, waits for nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from gateway.request.recorder import Recorder
from gateway.request.turn import Turn
from gateway.routing.router import Router
from gateway.values import Api, SessionKey

MAX_TURNS: Final = 64
"""Larger batches saved no CPU and doubled the p99 of what waits behind them."""
MAX_DELAY_S: Final = 0.025
MAX_UNREAD_BYTES: Final = 65_536
"""An answer that is longer is read at once, so that waiting turns hold little memory."""


class Ledger:
    """Belongs to one event loop. `add` and `drain` never raise."""

    def __init__(self, router: Router, recorder: Recorder, *, clock: Callable[[], float]) -> None:
        self._router, self._recorder, self._clock = router, recorder, clock
        self._turns: list[tuple[Turn, float]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.keys: set[SessionKey] = set()
        """Of the sessions with a turn in here."""

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn: Turn) -> None:
        """Take in a turn that has ended now."""
        self._turns.append((turn, self._clock()))
        if turn.trace is not None or turn.is_debug or turn.api is Api.RESPONSES:
            self.drain()
            return
        observer = turn.outcome.observer
        if observer is not None and observer.num_unread_bytes > MAX_UNREAD_BYTES:
            observer.finish()
        if turn.facts.session_key is not None:
            self.keys.add(turn.facts.session_key)
        if len(self._turns) >= MAX_TURNS:
            self.drain()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MAX_DELAY_S, self.drain)

    def drain(self) -> None:
        """Write down everything that waits, in order."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._turns:
            return
        turns, self._turns = self._turns, []
        self.keys.clear()
        now_s = self._clock()
        for turn, ended_s in turns:
            try:
                self._settle(turn, ended_s, now_s)
            except Exception as error:
                log = logging.getLogger(__name__)
                log.error("cannot write down request %s", turn.request_id, exc_info=error)

    def _settle(self, turn: Turn, ended_s: float, now_s: float) -> None:
        outcome, reservation = turn.outcome, turn.placement.reservation
        if outcome.observer is not None:
            outcome.observer.finish()
        if reservation is not None:
            turn.placement.reservation = None
            self._router.release(reservation, ended_s, outcome.usage, completed=outcome.is_answered)
        self._recorder.record(turn, ended_s, delay_s=now_s - ended_s)
