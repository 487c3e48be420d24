"""Charging tenants for their requests: this process's own ledger, and the one that replicas share if any.

Each request is charged once (`enter`) and settled once (`leave`). With a shared ledger one round trip
decides, within the request's budget for the store; when that gives no answer, this process decides alone,
going on from the last levels it has seen. So trouble with the store costs strictness, never an answer: each
replica then grants a whole limit.

The number of tenants may be anybody's choice (a claim in a token), so what is remembered is bounded: the
longest idle tenant is forgotten, one with requests under way never.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

from gateway.limits.allowance import Allowance, TenantUse, limit_headers, refusal
from gateway.limits.settings import TenantLimits


class SharedTenantUse(Protocol):
    """What all replicas know of tenants' use. Never raises for trouble with the store; safe to cancel."""

    async def draw(
        self, tenant: str, limits: TenantLimits, tokens: int, num_in_flight: int, deadline_s: float
    ) -> Allowance | None:
        """Charge one request over all replicas. `num_in_flight`: of this replica, this request included.
        None: there was no answer in time."""
        ...

    def settle(self, tenant: str, limits: TenantLimits, tokens: int) -> None:
        """Tell, in the background, that `tokens` more were used than charged, and that the number of
        requests under way here may have changed."""
        ...


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was let in; `TenantLimiter.leave` needs it back."""

    tenant: str
    limits: TenantLimits
    tokens: int
    allowance: Allowance

    def headers(self) -> list[tuple[str, str]]:
        """Return what the client is told of its limits."""
        return limit_headers(self.limits, self.allowance)


class TenantLimiter:
    """All tenants of one gateway process."""

    def __init__(
        self,
        *,
        max_tenants: int,
        clock: Callable[[], float],
        shared: SharedTenantUse | None = None,
    ) -> None:
        self._max_tenants, self._clock, self._shared = max_tenants, clock, shared
        self._uses: OrderedDict[str, TenantUse] = OrderedDict()
        self.rejections: Counter[str] = Counter()  # by cause

    async def enter(self, tenant: str, limits: TenantLimits, tokens: int, deadline_s: float) -> Charge:
        """Charge one request. Raises TooManyRequests. Safe to cancel."""
        use = self._use(tenant)
        use.num_in_flight += 1  # before anything is awaited, so that the count is exact
        is_granted = False
        try:
            allowance = await self._draw(tenant, limits, use, tokens, deadline_s)
            is_granted = allowance.refused_for is None
        finally:
            if not is_granted:  # refused or cancelled
                use.num_in_flight -= 1
                self._tell(tenant, limits, 0)
        if allowance.refused_for is not None:
            self.rejections[allowance.refused_for] += 1
            raise refusal(limits, allowance)
        return Charge(tenant=tenant, limits=limits, tokens=tokens, allowance=allowance)

    def leave(self, charge: Charge, used_tokens: int | None) -> None:
        """Settle one request, exactly once. `used_tokens` None: not known, the estimate stands."""
        use, more = self._uses[charge.tenant], 0
        use.num_in_flight -= 1
        if charge.limits.tokens_per_minute is not None and used_tokens is not None:
            more = used_tokens - charge.tokens
            use.correct(charge.limits, more, self._clock())
        self._tell(charge.tenant, charge.limits, more)

    def _tell(self, tenant: str, limits: TenantLimits, tokens: int) -> None:
        if self._shared is not None and (tokens or limits.max_in_flight is not None):
            self._shared.settle(tenant, limits, tokens)

    def num_in_flight(self, tenant: str) -> int:
        """Return how many requests of this tenant are under way here."""
        use = self._uses.get(tenant)
        return 0 if use is None else use.num_in_flight

    async def _draw(
        self, tenant: str, limits: TenantLimits, use: TenantUse, tokens: int, deadline_s: float
    ) -> Allowance:
        has_room_here = limits.max_in_flight is None or use.num_in_flight <= limits.max_in_flight
        if self._shared is not None and has_room_here:
            allowance = await self._shared.draw(tenant, limits, tokens, use.num_in_flight, deadline_s)
            if allowance is not None:
                use.adopt(allowance, self._clock())
                return allowance
        return use.draw(limits, tokens, use.num_in_flight - 1, self._clock())

    def _use(self, tenant: str) -> TenantUse:
        use = self._uses.get(tenant)
        if use is None:
            self._make_room()
            use = self._uses[tenant] = TenantUse(self._clock())
        else:
            self._uses.move_to_end(tenant)
        return use

    def _make_room(self) -> None:
        """Forget the longest idle, if there are too many. Those in flight are moved out of the way: O(1)
        amortised, because each is passed at most once between two of its own requests."""
        for _ in range(len(self._uses) + 1 - self._max_tenants):
            tenant, use = next(iter(self._uses.items()))
            if use.num_in_flight:
                self._uses.move_to_end(tenant)
            else:
                del self._uses[tenant]
