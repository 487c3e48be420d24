"""A circuit breaker, so that an unreachable Redis costs nothing per request.

Closed: Redis is asked. After some failures in a row it opens and Redis is not asked. A background task, never
a request, makes the single probe that closes it again; while that probe runs the breaker is half open. So an
outage costs at most one budget for each request that was in flight when it began.

Pure: knows neither time nor Redis.
"""

from __future__ import annotations

import enum


class BreakerState(enum.Enum):
    """Whether Redis is asked at all."""

    CLOSED = "closed"  # asked as needed
    OPEN = "open"  # not asked: it failed repeatedly
    HALF_OPEN = "half_open"  # one probe is running


class Breaker:
    """Counts consecutive failures; see the module."""

    __slots__ = ("_failures_to_open", "_num_failures", "state")

    def __init__(self, failures_to_open: int) -> None:
        self._failures_to_open = failures_to_open
        self._num_failures = 0
        self.state = BreakerState.CLOSED

    @property
    def is_closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def note_success(self) -> None:
        """Note an answer in time. Does not close an open breaker: it may answer an old command."""
        if self.state is BreakerState.CLOSED:
            self._num_failures = 0

    def note_failure(self) -> bool:
        """Note that there was no answer in time. Returns whether this opened the breaker."""
        if self.state is not BreakerState.CLOSED:
            return False
        self._num_failures += 1
        if self._num_failures < self._failures_to_open:
            return False
        self.state = BreakerState.OPEN
        return True

    def begin_probe(self) -> bool:
        """Return whether the caller should probe now; only one probes at a time."""
        if self.state is not BreakerState.OPEN:
            return False
        self.state = BreakerState.HALF_OPEN
        return True

    def end_probe(self, *, is_healthy: bool) -> None:
        """Close after a healthy probe, else open again."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.CLOSED if is_healthy else BreakerState.OPEN
            self._num_failures = 0
