"""Options of admission and of tenants' budgets: how much one gateway takes in, and who waits.

Invariant: settings that contradict each other cannot be built; the error names the option.
"""

from __future__ import annotations

import math

import msgspec


class TenantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one tenant may use; an option left out is no limit."""

    max_in_flight: int | None = None
    """Requests of this tenant under way at once."""
    requests_per_minute: int | None = None
    """Requests in the long run; a minute's worth may come at once."""
    tokens_per_minute: int | None = None
    """Prompt and completion tokens in the long run. A request is charged an estimate of its prompt when it
    comes, and the difference to what the engine reports when it ends."""

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 10**12:
                raise ValueError(f"{name} must be 1 to 10^12, or left out for no limit; got {value}")

    @property
    def is_unlimited(self) -> bool:
        return self.max_in_flight is self.requests_per_minute is self.tokens_per_minute is None


class LimitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds on what one gateway process takes in."""

    max_in_flight: int = 4096
    """Requests served at once in this process; those beyond wait in the queue."""
    max_in_flight_per_backend: int | None = None
    """Requests sent to one backend at once by this process; null is no limit. New sessions then go to
    another backend, turns of bound sessions wait for their home."""
    queue_size: int = 256
    """Requests that may wait for a place; beyond them clients get 503 with Retry-After. 0 is no queue."""
    queue_timeout_s: float = 10.0
    """Longest wait for a place; then 503 with Retry-After."""
    queue_priority_step_s: float = 5.0
    """How much waiting a step of priority is worth: follow-up turns overtake new sessions that came at most
    so many seconds earlier, and so does a tenant of the next higher priority."""
    max_retry_after_s: float = 60.0
    """Longest time for which a backend's own Retry-After keeps new sessions away from it."""
    per_tenant: TenantLimits = TenantLimits()
    """What each tenant may use that has no limits of its own."""
    max_tenants_tracked: int = 10_000
    """Tenants whose use is remembered; beyond them the longest idle is forgotten."""
    max_answer_observe_bytes: int = 1024 * 1024
    """Non-stream answers up to this size are read for token usage while they pass."""

    def __post_init__(self) -> None:
        if self.max_in_flight < 1 or self.max_tenants_tracked < 1:
            raise ValueError("max_in_flight and max_tenants_tracked must be at least 1")
        if self.max_in_flight_per_backend is not None and self.max_in_flight_per_backend < 1:
            raise ValueError("max_in_flight_per_backend must be at least 1, or null for no limit")
        if self.queue_size < 0:
            raise ValueError("queue_size must be at least 0")
        if self.max_in_flight_per_backend is not None and self.queue_size == 0:
            raise ValueError(
                "max_in_flight_per_backend needs a queue_size above 0: turns wait for their home"
            )
        for name in ("queue_timeout_s", "queue_priority_step_s", "max_retry_after_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of seconds, got {value}")
