"""Whether a failed attempt may be retried on another backend: rules and a budget, which the proxy applies.

Nothing is retried once a byte of the answer has gone to the client, and none goes before it has content.
Until then a request may move to a backend that was not tried yet, if another backend can cure the failure: a
connect error, a reset, an end or an error event before any content, 502, 503 or 504, and 429 if so
configured. The *retry budget* keeps retries a small share of the traffic (as in Finagle and Envoy): if the
whole fleet is sick, retries would add to the load that makes it sick.
"""

from __future__ import annotations

import msgspec

from gateway.errors import GatewayError


class FailoverSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When and how often a request moves to another backend."""

    max_attempts: int = 3
    """Upstream attempts per client request, the first included."""
    retry_statuses: tuple[int, ...] = (502, 503, 504)
    """Statuses of a backend that another backend may cure. Add 429 to spread overload."""
    hold_s: float = 30.0
    """How long an answer that has begun at a backend is held back while it has no content, in seconds. Until
    then another backend can still take the request. After it the client gets the head and, in an event
    stream, comments that keep the connection alive. 0 holds nothing."""
    budget_ratio: float = 0.2
    """Retries allowed per request seen, as a long-run share."""
    budget_min: int = 10
    """Retries always available in a burst, so that a quiet gateway can fail over too."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError("max_attempts must be at least 1")
        if not 0.0 <= self.hold_s <= 3600.0:
            raise ValueError("hold_s must lie in 0..3600")
        bad = [status for status in self.retry_statuses if status < 429 or status > 599]
        if bad:
            raise ValueError(f"retry_statuses must lie in 429..599, got {bad}")


class RetryBudget:
    """A token bucket: requests fill it, retries empty it. O(1), no clock."""

    def __init__(self, settings: FailoverSettings) -> None:
        self._ratio = settings.budget_ratio
        self._cap = max(1.0, settings.budget_min * 10.0)
        self._tokens = float(max(1, settings.budget_min))

    def deposit(self) -> None:
        """Count one client request."""
        self._tokens = min(self._cap, self._tokens + self._ratio)

    def withdraw(self) -> bool:
        """Take one retry. Returns False if the budget is spent; then the failure is the answer."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


def may_try_another(error: GatewayError, *, num_attempts: int, settings: FailoverSettings) -> bool:
    """Whether another backend may cure this failure, after `num_attempts` attempts."""
    return error.is_retryable and num_attempts < settings.max_attempts
