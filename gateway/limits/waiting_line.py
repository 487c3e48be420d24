"""The order in which requests wait. Pure: no clock, no tasks.

Each waiter has a *rank*: its time of arrival minus the lead that its priority gives it. The smallest rank is
next. So waiters of equal priority are served in order of arrival, a higher priority overtakes only those that
arrived at most one lead earlier, and no waiter starves: after waiting longer than the lead it cannot be
overtaken. (Strict priority classes with ageing would need more rules for the same result.)
"""

from __future__ import annotations

import bisect
from typing import Generic, TypeVar

Waiter = TypeVar("Waiter")
Ticket = tuple[float, int]
"""Rank and number of one waiter: its place in the order, and the handle to remove it."""


class WaitingLine(Generic[Waiter]):
    """A sorted list. Insertion and removal shift pointers, which for the few hundred waiters of a queue is
    faster than a heap with tombstones, and leaves nothing behind when a waiter gives up."""

    def __init__(self) -> None:
        self._tickets: list[Ticket] = []
        self._waiters: dict[Ticket, Waiter] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def join(self, rank: float, waiter: Waiter) -> Ticket:
        """Add a waiter; among equal ranks the earlier one is first."""
        ticket = (rank, self._next_number)
        self._next_number += 1
        bisect.insort(self._tickets, ticket)
        self._waiters[ticket] = waiter
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Remove a waiter from any position. Does nothing if it has been served."""
        if self._waiters.pop(ticket, None) is not None:
            del self._tickets[bisect.bisect_left(self._tickets, ticket)]

    def next(self) -> Waiter:
        """Remove and return the first waiter. Raises IndexError when there is none."""
        return self._waiters.pop(self._tickets.pop(0))
