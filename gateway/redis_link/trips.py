"""What the wait for Redis costs a request, counted in ticks of the event loop, and whose turn it is.

Redis is not to blame for what we are late with ourselves. So a tick counts against it only if an operation
waited on its socket when the tick began and still does when it ends: the loop has polled the socket in
between and nothing was there. However late a tick comes, it counts once. An answer that has been received and
waits for a turn of the loop is not counted. What waits for one of our own places gives up only when Redis has
answered nobody for as long as a budget.

The second bound, `StoreBudget.total_s`, counts every tick. It ends what the first one does not: a queue for
our places that is longer than Redis can serve.

Rejected: deadlines in wall time. At 64 requests in flight the loop needs more than a budget of 50 ms for the
ten turns that two calls take, and an idle Redis counted as failed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, Protocol

from gateway.values import StoreBudget

TICKS_PER_BUDGET = 10
MIN_TICK_S = 0.001


class Socket(Protocol):
    """What is asked of the connection that an operation uses."""

    @property
    def owes_answer(self) -> bool:
        """Whether somebody waits on it and nothing has arrived."""
        ...

    def abort(self) -> None:
        """Close it at once; who waits on it gets an error."""
        ...


class Trip:
    """One operation: waiting for its turn, under way, or ended. `outcome` is what its caller waits for; the
    operation may go on when it is done already."""

    __slots__ = ("_was_silent", "budget", "operation", "outcome", "shard", "silent_s", "socket")

    def __init__(
        self, shard: int, operation: Callable[[], Coroutine[Any, Any, Any]], budget: StoreBudget
    ) -> None:
        self.shard = shard
        self.operation = operation
        self.budget = budget
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.socket: Socket | None = None  # the connection in use; set by the connection
        self.silent_s = 0.0  # how long Redis has been silent while this was under way
        self._was_silent = False

    def note_tick(self, tick_s: float) -> bool:
        """Count one tick of a trip under way. Returns whether Redis was silent throughout."""
        is_silent = self.socket is not None and self.socket.owes_answer
        is_counted = is_silent and self._was_silent
        self._was_silent = is_silent
        self.silent_s += tick_s if is_counted else 0.0
        if not self.outcome.done():
            self.budget.charge(tick_s, is_silent=is_counted)
        return is_counted

    def end(self, outcome: object) -> None:
        """Tell the caller, if it still waits."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


current_trip: ContextVar[Trip | None] = ContextVar("current_trip", default=None)
"""The trip that the running task makes, for the connection that it uses."""


class Trips:
    """All trips of one link: at most `num_places` under way, the others queue in order."""

    def __init__(
        self,
        num_places: int,
        *,
        budget_s: float,
        patience_s: float,
        start: Callable[[Trip], None],
        give_up: Callable[[Trip], None],
    ) -> None:
        """`start` begins the operation of a trip and calls `leave` at its end; `give_up` ends a trip whose
        budget is spent. An operation that Redis leaves without an answer for `patience_s` loses its
        connection."""
        self._num_places = num_places
        self._tick_s = max(MIN_TICK_S, min(budget_s, patience_s) / TICKS_PER_BUDGET)
        self._patience_s = patience_s
        self._start = start
        self._give_up = give_up
        self._under_way: set[Trip] = set()
        self._queue: deque[Trip] = deque()
        self._stuck_s = 0.0  # how long Redis has answered nobody
        self._ticker: asyncio.TimerHandle | None = None

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def is_under_way(self, trip: Trip) -> bool:
        return trip in self._under_way

    def enter(self, trip: Trip) -> None:
        """Start the trip, or queue it if all places are taken."""
        if len(self._under_way) < self._num_places:
            self.watch(trip)
            self._start(trip)
        else:
            self._queue.append(trip)

    def watch(self, trip: Trip) -> None:
        """Count the ticks of a trip that needs no place or has been given one."""
        self._under_way.add(trip)
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def leave(self, trip: Trip) -> None:
        """The operation has ended: its place goes to the next that still wants it."""
        self._under_way.discard(trip)
        self._stuck_s = 0.0
        while self._queue and len(self._under_way) < self._num_places:
            following = self._queue.popleft()
            if not following.outcome.done():
                self.watch(following)
                self._start(following)

    def send_away(self, shard: int, outcome: object) -> None:
        """End the trips of this shard that still queue."""
        for trip in self._queue:
            if trip.shard == shard:
                trip.end(outcome)

    def close(self) -> None:
        """Stop counting."""
        if self._ticker is not None:
            self._ticker.cancel()

    def _tick(self) -> None:
        self._ticker = None
        silent = [trip for trip in self._under_way if trip.note_tick(self._tick_s)]
        self._stuck_s = self._stuck_s + self._tick_s if len(silent) == len(self._under_way) else 0.0
        for trip in self._queue:
            trip.budget.charge(self._tick_s, is_silent=False)
        given_up = [trip for trip in self._under_way if trip.budget.is_spent]
        given_up += [
            trip for trip in self._queue if trip.budget.is_spent or trip.budget.silence_s <= self._stuck_s
        ]
        for trip in given_up:
            if not trip.outcome.done():
                self._give_up(trip)
        for trip in silent:
            if trip.silent_s >= self._patience_s and trip.socket is not None:
                trip.socket.abort()
        if self._under_way:
            self._ticker = asyncio.get_running_loop().call_later(self._tick_s, self._tick)
