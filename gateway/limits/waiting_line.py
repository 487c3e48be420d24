"""Who waits, in which order. Pure: knows neither clock nor tasks.

Each waiter has a *rank*, the time at which it came less the lead that its priority gives it; the smallest
rank is next. So those of equal priority are served first come first served, a higher priority overtakes
only what came at most one lead earlier, and nobody starves: whoever waits longer than the lead is passed
by no newcomer. (Strict classes with a separate ageing rule would say the same in more words.)
"""

from __future__ import annotations

import bisect
from typing import Generic, TypeVar

Waiter = TypeVar("Waiter")
Ticket = tuple[float, int]
"""Rank and number of one waiter: what orders it, and what takes it out again."""


class WaitingLine(Generic[Waiter]):
    """A sorted list. Each step moves at most all pointers behind one place, which is faster than a heap
    with holes for the few hundred waiters that a queue holds, and leaves nothing behind when one gives up."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self._waiters: dict[Ticket, Waiter] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def join(self, rank: float, waiter: Waiter) -> Ticket:
        """Add a waiter; of equal ranks the earlier comer is first."""
        ticket = (rank, self._next_number)
        self._next_number += 1
        bisect.insort(self._tickets, ticket)
        self._waiters[ticket] = waiter
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Take a waiter out, wherever it stands. Does nothing if it has been served."""
        if self._waiters.pop(ticket, None) is not None:
            del self._tickets[bisect.bisect_left(self._tickets, ticket)]

    def next(self) -> Waiter:
        """Remove and return who is first. Raises IndexError when nobody waits."""
        return self._waiters.pop(self._tickets.pop(0))
