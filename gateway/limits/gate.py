"""A bounded number of places, and a line of requests waiting for one.

A place given back while requests wait goes directly to the first in line and is never free in between, so a
new request cannot overtake. A request that is cancelled or times out leaves the line at once; one that gets a
place just as it is cancelled passes it on.

Invariant: places taken = requests between a successful `try_enter` or `wait` and their one `leave`. A place
is free only if no request waits. Several gates share one `QueueRoom`, the bound on all lines together.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from gateway.errors import Overloaded
from gateway.limits.waiting_line import Ticket, WaitingLine

RETRY_AFTER_S = 1.0  # places free up as answers end; there is no better estimate

REJECTION_CAUSES = ("in_flight", "queue_full", "queue_timeout")


class QueueRoom:
    """How many requests may wait, over all gates, and how many were refused."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_waiting = 0
        self.rejections: Counter[str] = Counter()  # by cause

    def refuse(self, cause: str, message: str) -> Overloaded:
        """Count a refusal and return the error for it."""
        self.rejections[cause] += 1
        return Overloaded(message, retry_after_s=RETRY_AFTER_S)


class Gate:
    """Places of one kind. Belongs to one event loop."""

    def __init__(self, num_places: int, room: QueueRoom) -> None:
        self._num_places, self._room = num_places, room
        self._line: WaitingLine[asyncio.Future[None]] = WaitingLine()
        self.num_inside = 0

    def __repr__(self) -> str:
        return f"<Gate {self.num_inside} of {self._num_places} places taken, {len(self._line)} waiting>"

    @property
    def is_full(self) -> bool:
        return self.num_inside >= self._num_places

    @property
    def is_unused(self) -> bool:
        return self.num_inside == 0 and len(self._line) == 0

    def try_enter(self) -> bool:
        """Take a place if one is free. Costs one comparison."""
        if self.num_inside >= self._num_places:
            return False
        self.num_inside += 1
        return True

    async def wait(self, rank: float, timeout_s: float) -> None:
        """Wait for a place. Raises Overloaded if the line is full or the wait too long. Safe to cancel."""
        room = self._room
        if room.num_waiting >= room.size:
            raise room.refuse(
                "queue_full", f"{room.num_waiting} requests are waiting already, which is the limit"
            )
        loop = asyncio.get_running_loop()
        called: asyncio.Future[None] = loop.create_future()
        ticket = self._line.join(rank, called)
        room.num_waiting += 1
        timer = loop.call_later(timeout_s, self._give_up, ticket, called, timeout_s)
        try:
            await called
        except asyncio.CancelledError:
            if called.done() and not called.cancelled() and called.exception() is None:
                self.leave()  # we had just been given a place
            raise
        finally:
            timer.cancel()
            self._line.leave(ticket)
            room.num_waiting -= 1

    def leave(self) -> None:
        """Give a place back, to the first in line if there is one."""
        while len(self._line) and self.num_inside <= self._num_places:
            called = self._line.next()
            if not called.done():
                called.set_result(None)
                return
        self.num_inside -= 1
        assert self.num_inside >= 0, "a place was given back twice"

    def resize(self, num_places: int) -> None:
        """Change the number of places. Those inside stay; those in line get any new places."""
        self._num_places = num_places
        while len(self._line) and self.num_inside < num_places:
            self.num_inside += 1
            self.leave()  # to the first in line

    def dismiss(self) -> None:
        """Let in all that wait, even beyond the number of places: they would wait in vain."""
        while len(self._line):
            called = self._line.next()
            if not called.done():
                self.num_inside += 1
                called.set_result(None)

    def _give_up(self, ticket: Ticket, called: asyncio.Future[None], timeout_s: float) -> None:
        self._line.leave(ticket)
        if not called.done():
            called.set_exception(
                self._room.refuse("queue_timeout", f"no place became free within {timeout_s:g} s")
            )
