"""Options of admission and of tenants' limits: how much one gateway accepts, and what waits.

Invariant: contradictory settings cannot be built; the error names the option.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec


class TenantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one tenant may use; an option that is left out sets no limit."""

    max_in_flight: int | None = None
    """Concurrent requests of this tenant."""
    requests_per_minute: int | None = None
    """Average rate of requests; a minute's worth may arrive at once."""
    tokens_per_minute: int | None = None
    """Average rate of prompt and completion tokens. A request is charged an estimate of its prompt when it
    arrives, and the difference to its real use when it ends: what the engine reports, or what was seen of the
    answer where it reports nothing or the client left before. Counts of tokens are charged none."""
    cached_token_rate: float = 1.0
    """How much of a prompt token the engine's cache had counts against `tokens_per_minute`: 1 is all of it,
    0 nothing. The estimate on arrival always counts all."""

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 10**12:
                raise ValueError(f"{name} must be 1 to 10^12, or left out for no limit, got {value}")

        if not 0.0 <= self.cached_token_rate <= 1.0:
            raise ValueError(f"cached_token_rate must be 0 to 1, got {self.cached_token_rate}")

    @property
    def is_unlimited(self) -> bool:
        return self.max_in_flight is self.requests_per_minute is self.tokens_per_minute is None


class LimitSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bounds on what one gateway process accepts."""

    max_in_flight: int = 4096
    """Concurrent requests in this process; further ones wait in the queue."""
    max_in_flight_per_backend: int | None = None
    """Concurrent requests from this process to one backend; null is no limit. At the limit, new sessions go
    to another backend and turns of bound sessions wait for their home."""
    queue_size: int = 256
    """Requests that may wait for a place; further ones get 503 with Retry-After. 0 is no queue."""
    queue_timeout_s: float = 10.0
    """Longest wait for a place; after it the client gets 503 with Retry-After."""
    queue_priority_step_s: float = 5.0
    """How many seconds of waiting one step of priority is worth: follow-up turns overtake new sessions that
    arrived at most this much earlier, and so do requests of a tenant with the next higher priority."""
    max_retry_after_s: float = 60.0
    """Longest time that a backend's Retry-After keeps new sessions away from it."""
    per_tenant: TenantLimits = TenantLimits()
    """Limits of each tenant that has no `limits` of its own."""
    max_tenants_tracked: int = 10_000
    """Tenants whose use is tracked; beyond this the one idle longest is forgotten."""
    max_answer_observe_bytes: int = 1024 * 1024
    """Non-streamed answers up to this size are parsed for token usage as they pass."""

    ask_for_usage: Literal["never", "limited", "always"] = "limited"
    """Whose streams of chats and completions the gateway asks for their token usage where the client has not:
    those of tenants with `tokens_per_minute`, or of all. Only vLLM, SGLang, TensorRT-LLM and our worker are
    asked; llama.cpp tells by itself. The additional chunk is kept from the client. A stream that does not
    report is charged by what was seen of it."""

    def __post_init__(self) -> None:
        if self.max_in_flight < 1 or self.max_tenants_tracked < 1:
            raise ValueError("max_in_flight and max_tenants_tracked must be at least 1")
        if self.max_in_flight_per_backend is not None and self.max_in_flight_per_backend < 1:
            raise ValueError("max_in_flight_per_backend must be at least 1, or null for no limit")
        if self.queue_size < 0:
            raise ValueError("queue_size must be at least 0")
        if self.max_in_flight_per_backend is not None and self.queue_size == 0:
            raise ValueError(
                "max_in_flight_per_backend needs a queue_size above 0, because turns wait for their home"
            )
        for name in ("queue_timeout_s", "queue_priority_step_s", "max_retry_after_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of seconds, got {value}")
