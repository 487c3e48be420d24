"""Charging tenants for their requests: in this process, and in the use that replicas share, if any.

Each request is charged once (`enter`) and settled once (`leave`). With shared use one round trip decides,
within the request's budget for the store; without an answer this process decides alone, from the last levels
that it has seen. So when Redis fails, requests are still answered but limits are less strict: each replica
grants the whole limit.

Clients may influence the number of tenants (a claim in a token), so the number tracked is bounded: the tenant
idle longest is forgotten, but never one with requests in flight.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

from gateway.limits.allowance import Allowance, TenantUse, limit_headers, refusal
from gateway.limits.settings import TenantLimits
from gateway.values import StoreBudget


class SharedTenantUse(Protocol):
    """Tenants' use over all replicas. Never raises when Redis fails; safe to cancel."""

    async def draw(
        self, tenant: str, limits: TenantLimits, tokens: int, num_in_flight: int, budget: StoreBudget | None
    ) -> Allowance | None:
        """Charge one request over all replicas. `num_in_flight` is this replica's, including this request.
        Returns None if there was no answer in time."""
        ...

    def settle(self, tenant: str, limits: TenantLimits, tokens: int) -> None:
        """Report in the background that `tokens` more were used than charged, and that the number of
        requests in flight here may have changed."""
        ...


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted request; pass it back to `TenantLimiter.leave`."""

    tenant: str
    limits: TenantLimits
    tokens: int
    allowance: Allowance

    def headers(self) -> list[tuple[str, str]]:
        """Return the `x-ratelimit-…` headers for the client."""
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

    @property
    def is_shared(self) -> bool:
        """Whether replicas decide together, so that `enter` may have to wait."""
        return self._shared is not None

    async def enter(
        self, tenant: str, limits: TenantLimits, tokens: int, budget: StoreBudget | None
    ) -> Charge:
        """Charge one request. Raises TooManyRequests. Safe to cancel."""
        use = self._use(tenant)
        use.num_in_flight += 1  # before anything is awaited, so that the count is exact
        try:
            allowance = await self._draw(tenant, limits, use, tokens, budget)
        except BaseException:
            use.num_in_flight -= 1
            self._settle(tenant, limits, 0)
            raise
        return self._admit(tenant, limits, use, tokens, allowance)

    def enter_here(self, tenant: str, limits: TenantLimits, tokens: int) -> Charge:
        """The same where nobody else is asked: without waiting."""
        use = self._use(tenant)
        use.num_in_flight += 1
        allowance = use.draw(limits, tokens, use.num_in_flight - 1, self._clock())
        return self._admit(tenant, limits, use, tokens, allowance)

    def _admit(
        self, tenant: str, limits: TenantLimits, use: TenantUse, tokens: int, allowance: Allowance
    ) -> Charge:
        if allowance.refused_for is not None:
            use.num_in_flight -= 1
            self._settle(tenant, limits, 0)
            self.rejections[allowance.refused_for] += 1
            raise refusal(limits, allowance)
        return Charge(tenant=tenant, limits=limits, tokens=tokens, allowance=allowance)

    def leave(self, charge: Charge, used_tokens: int) -> None:
        """Settle one request, exactly once."""
        use, more = self._uses[charge.tenant], 0
        use.num_in_flight -= 1
        if charge.limits.tokens_per_minute is not None:
            more = used_tokens - charge.tokens
            use.correct(charge.limits, more, self._clock())
        self._settle(charge.tenant, charge.limits, more)

    def _settle(self, tenant: str, limits: TenantLimits, tokens: int) -> None:
        if self._shared is not None and (tokens or limits.max_in_flight is not None):
            self._shared.settle(tenant, limits, tokens)

    def num_in_flight(self, tenant: str) -> int:
        """Return how many requests of this tenant are in flight here."""
        use = self._uses.get(tenant)
        return 0 if use is None else use.num_in_flight

    async def _draw(
        self, tenant: str, limits: TenantLimits, use: TenantUse, tokens: int, budget: StoreBudget | None
    ) -> Allowance:
        has_room_here = limits.max_in_flight is None or use.num_in_flight <= limits.max_in_flight
        if self._shared is not None and has_room_here:
            allowance = await self._shared.draw(tenant, limits, tokens, use.num_in_flight, budget)
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
        """Forget the tenant idle longest, if there are too many. Tenants with requests in flight are moved to
        the end: O(1) amortised, because each is moved at most once between two of its own requests."""
        for _ in range(len(self._uses) + 1 - self._max_tenants):
            tenant, use = next(iter(self._uses.items()))
            if use.num_in_flight:
                self._uses.move_to_end(tenant)
            else:
                del self._uses[tenant]
