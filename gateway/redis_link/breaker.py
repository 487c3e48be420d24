"""When to stop asking a store that does not answer, so that a dead Redis costs nothing per request.

Closed: everybody asks. After some failures in a row: open, nobody asks. A background task, never a request,
makes the single probe that closes it again; while that probe runs the breaker is half open. So the price of
an outage is at most one budget for each of the requests that were under way when it began.

Pure: knows neither time nor Redis.
"""

from __future__ import annotations

import enum


class BreakerState(enum.Enum):
    """Whether the shared store is asked at all; see `breaker.py`."""

    CLOSED = "closed"  # asked as needed
    OPEN = "open"  # not asked: it failed repeatedly
    HALF_OPEN = "half_open"  # one probe is on its way


class Breaker:
    """Counts failures in a row; see the module."""

    __slots__ = ("_failures_to_open", "_num_failures", "state")

    def __init__(self, failures_to_open: int) -> None:
        self._failures_to_open = failures_to_open
        self._num_failures = 0
        self.state = BreakerState.CLOSED

    @property
    def is_closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def note_success(self) -> None:
        """An answer in time. Does not close an open breaker: it may be an answer to an old question."""
        if self.state is BreakerState.CLOSED:
            self._num_failures = 0

    def note_failure(self) -> bool:
        """No answer, or none in time. True if this opened the breaker."""
        if self.state is not BreakerState.CLOSED:
            return False
        self._num_failures += 1
        if self._num_failures < self._failures_to_open:
            return False
        self.state = BreakerState.OPEN
        return True

    def begin_probe(self) -> bool:
        """True if the caller is to probe now; only one does at a time."""
        if self.state is not BreakerState.OPEN:
            return False
        self.state = BreakerState.HALF_OPEN
        return True

    def end_probe(self, *, is_healthy: bool) -> None:
        """The probe's result: closed, or open again."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.CLOSED if is_healthy else BreakerState.OPEN
            self._num_failures = 0
