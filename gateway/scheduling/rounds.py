"""Takes the work that one turn of the event loop brings together, stage by stage.

Under load the loop reports dozens of ready sockets at once. To serve each from its first line to its last
before the next is looked at costs nearly twice the CPU (141 against 85 µs for a request of 1 KB, at 15 per
turn), because the code of each step, and the kernel's of each system call, pushes that of the others out of
the processor's caches. So what has arrived waits until all of the turn is here; then one stage runs for all
of it, then the next. Switches that take packets in vectors do the same for the same reason.

Nothing waits for more work to come: a round runs in the next turn of the loop, before that waits for sockets.
An order between two things of one connection is that connection's business; it takes what has arrived before
it acts on anything else.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary


class Stage(enum.IntEnum):
    """In the order of a round: what frees capacity comes before what needs it."""

    ANSWERS = 0
    """Bytes of backends are read, and made into bytes for clients."""
    WRITES = 1
    """Those bytes leave."""
    ENDS = 2
    """Requests that have been answered give back what they hold."""
    REQUESTS = 3
    """Bytes of clients are read: heads and bodies."""
    TURNS = 4
    """Requests that can go on take their steps: placed, and sent to backends."""


class Rounds:
    """Of one event loop."""

    def __init__(self) -> None:
        self._calls: list[list[Callable[[], None]]] = [[] for _ in Stage]
        self._is_due = False

    def __repr__(self) -> str:
        return f"<Rounds {', '.join(str(len(calls)) for calls in self._calls)} waiting>"

    def add(self, stage: Stage, call: Callable[[], None]) -> None:
        """Have `call` made in its stage: of this round where that is still to come, else of the next."""
        self._calls[stage].append(call)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        waiting = self._calls
        for stage in range(len(waiting)):
            calls = waiting[stage]
            if calls:
                waiting[stage] = []
                for call in calls:
                    try:
                        call()
                    except Exception:  # of one connection: the others go on
                        logging.getLogger(__name__).exception("call_in_round_failed")
        self._is_due = any(waiting)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._run)


_of_loops: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, Rounds]] = WeakKeyDictionary()


def rounds_of_loop() -> Rounds:
    """Return those of the running loop."""
    loop = asyncio.get_running_loop()
    rounds = _of_loops.get(loop)
    if rounds is None:
        rounds = _of_loops[loop] = Rounds()
    return rounds
