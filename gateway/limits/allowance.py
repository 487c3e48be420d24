"""What one tenant has left of its limits. Pure: the rule in one place, in requests and tokens.

Each limited rate has a token bucket that holds at most a minute's worth and refills evenly; a request takes
from all buckets or from none. Tokens are charged in two steps: an estimate of the prompt when the request
arrives, and the difference to the actual use when it ends; one that spends none is not held up by an empty
bucket. So a bucket may go below zero, and the tenant then
waits until it has refilled. A request larger than a whole bucket passes when the bucket is full, because it
could never pass otherwise.

`redis_link/scripts/draw.lua` applies the same rule to the use that replicas share; a test compares the two.
"""

from __future__ import annotations

import math

import msgspec

from gateway.errors import TooManyRequests
from gateway.limits.settings import TenantLimits
from gateway.values import RequestFacts

REFUSAL_CAUSES = ("tenant_in_flight", "tenant_requests", "tenant_tokens")
_BYTES_PER_TOKEN = 4  # English text; corrected when the request ends
_IN_FLIGHT_RETRY_S = 1.0  # a place frees up when an answer ends; there is no better estimate


class Allowance(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The decision for one request: granted or not, and what is left after it."""

    refused_for: str | None = None  # one of REFUSAL_CAUSES
    retry_after_s: float = 0.0
    requests_left: float = 0.0  # meaningless without such a limit
    tokens_left: float = 0.0


def judge(
    limits: TenantLimits, *, requests_left: float, tokens_left: float, num_in_flight: int, tokens: int
) -> tuple[str | None, float]:
    """Return why a request of this many tokens must be refused, or None, and when to retry.

    `num_in_flight` does not count the request itself.
    """
    if limits.max_in_flight is not None and num_in_flight >= limits.max_in_flight:
        return "tenant_in_flight", _IN_FLIGHT_RETRY_S
    if limits.requests_per_minute is not None and requests_left < 1.0:
        return "tenant_requests", (1.0 - requests_left) * 60.0 / limits.requests_per_minute
    if limits.tokens_per_minute is not None and tokens > 0:
        needed = min(tokens, limits.tokens_per_minute)
        if tokens_left < needed:
            return "tenant_tokens", (needed - tokens_left) * 60.0 / limits.tokens_per_minute
    return None, 0.0


def estimated_tokens(facts: RequestFacts) -> int:
    """Return what a request is charged on arrival: its prompt, at an average token length; at least 1."""
    return facts.num_prompt_bytes // _BYTES_PER_TOKEN or 1


class TenantUse:
    """One tenant's buckets and requests in flight, as this process knows them."""

    __slots__ = ("_at_s", "_requests_left", "_tokens_left", "num_in_flight")

    def __init__(self, now_s: float) -> None:
        self._requests_left = self._tokens_left = math.inf  # limited to a full bucket at the first refill
        self._at_s = now_s
        self.num_in_flight = 0

    def draw(self, limits: TenantLimits, tokens: int, num_in_flight: int, now_s: float) -> Allowance:
        """Charge one request if the limits allow it. `num_in_flight` does not count it."""
        self._refill(limits, now_s)
        refused_for, retry_after_s = judge(
            limits,
            requests_left=self._requests_left,
            tokens_left=self._tokens_left,
            num_in_flight=num_in_flight,
            tokens=tokens,
        )
        if refused_for is None:
            self._requests_left -= 1
            self._tokens_left -= tokens
        return Allowance(
            refused_for=refused_for,
            retry_after_s=retry_after_s,
            requests_left=self._requests_left,
            tokens_left=self._tokens_left,
        )

    def correct(self, limits: TenantLimits, tokens: int, now_s: float) -> None:
        """Charge `tokens` more, or give tokens back if negative."""
        self._refill(limits, now_s)
        self._tokens_left -= tokens

    def adopt(self, allowance: Allowance, now_s: float) -> None:
        """Adopt the shared levels, to continue from them if Redis becomes unavailable."""
        self._requests_left, self._tokens_left = allowance.requests_left, allowance.tokens_left
        self._at_s = now_s

    def _refill(self, limits: TenantLimits, now_s: float) -> None:
        minutes = max(0.0, now_s - self._at_s) / 60.0
        self._at_s = now_s
        self._requests_left = _refilled(self._requests_left, limits.requests_per_minute, minutes)
        self._tokens_left = _refilled(self._tokens_left, limits.tokens_per_minute, minutes)


def _refilled(left: float, per_minute: int | None, minutes: float) -> float:
    return math.inf if per_minute is None else min(float(per_minute), left + minutes * per_minute)


# -- what clients are told


def limit_headers(limits: TenantLimits, allowance: Allowance) -> list[tuple[str, str]]:
    """Return OpenAI's `x-ratelimit-…` headers for the limits that this tenant has."""
    headers: list[tuple[str, str]] = []
    for name, per_minute, left in (
        ("requests", limits.requests_per_minute, allowance.requests_left),
        ("tokens", limits.tokens_per_minute, allowance.tokens_left),
    ):
        if per_minute is not None:
            reset_s = max(0.0, per_minute - left) * 60.0 / per_minute
            headers += [
                (f"x-ratelimit-limit-{name}", str(per_minute)),
                (f"x-ratelimit-remaining-{name}", str(max(0, math.floor(left)))),
                (f"x-ratelimit-reset-{name}", format_duration(reset_s)),
            ]
    return headers


_LIMIT_TEXTS = {
    "tenant_in_flight": "{limits.max_in_flight} concurrent requests",
    "tenant_requests": "{limits.requests_per_minute} requests per minute",
    "tenant_tokens": "{limits.tokens_per_minute} tokens per minute",
}


def refusal(limits: TenantLimits, allowance: Allowance) -> TooManyRequests:
    """Return the error of a refused request."""
    assert allowance.refused_for is not None
    limit = _LIMIT_TEXTS[allowance.refused_for].format(limits=limits)
    wait = format_duration(allowance.retry_after_s)
    return TooManyRequests(
        f"Rate limit reached: {limit}. Please try again in {wait}.",
        retry_after_s=allowance.retry_after_s,
        headers=limit_headers(limits, allowance),
    )


def format_duration(seconds: float) -> str:
    """Return a duration as OpenAI's headers write it: `120ms`, `7.5s`, `6m0s`."""
    num_ms = math.ceil(seconds * 1000)
    if num_ms < 1000:
        return f"{num_ms}ms"
    minutes, rest_ms = divmod(num_ms, 60_000)
    rest = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes}m{rest}" if minutes else rest
