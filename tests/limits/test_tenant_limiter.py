"""Charging and settling, with and without shared tenant use."""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import TooManyRequests
from gateway.limits.allowance import Allowance
from gateway.limits.settings import TenantLimits
from gateway.limits.tenant_limiter import TenantLimiter
from gateway.values import StoreBudget


class ScriptedTenantUse:
    """Answers what the test says; records what it was told."""

    def __init__(self, *answers: Allowance | None) -> None:
        self._answers = list(answers)
        self.is_stuck = False
        self.settled: list[tuple[str, int]] = []

    async def draw(
        self, tenant: str, limits: TenantLimits, tokens: int, num_in_flight: int, budget: StoreBudget | None
    ) -> Allowance | None:
        if self.is_stuck:
            await asyncio.Event().wait()
        return self._answers.pop(0)

    def settle(self, tenant: str, limits: TenantLimits, tokens: int) -> None:
        self.settled.append((tenant, tokens))


def limiter(shared: ScriptedTenantUse | None = None, max_tenants: int = 10) -> TenantLimiter:
    return TenantLimiter(max_tenants=max_tenants, clock=lambda: 0.0, shared=shared)


async def test_tenants_do_not_share_a_bucket() -> None:
    """One tenant's storm leaves another's allowance whole; refusals are counted by cause."""
    limits = TenantLimits(requests_per_minute=1)
    one = limiter()
    await one.enter("a", limits, 0, None)
    with pytest.raises(TooManyRequests) as caught:
        await one.enter("a", limits, 0, None)
    assert dict(caught.value.headers)["x-ratelimit-remaining-requests"] == "0"
    assert one.rejections == {"tenant_requests": 1}
    assert await one.enter("b", limits, 0, None) is not None


async def test_in_flight_counts_from_enter_to_leave() -> None:
    """The place is free again once the request has ended; a refusal takes none."""
    limits = TenantLimits(max_in_flight=1)
    one = limiter()
    charge = await one.enter("a", limits, 0, None)
    with pytest.raises(TooManyRequests):
        await one.enter("a", limits, 0, None)
    one.leave(charge, 0)
    assert one.num_in_flight("a") == 0
    assert await one.enter("a", limits, 0, None) is not None


async def test_real_use_corrects_the_charge() -> None:
    """Charged 10: 4 used gives 6 back, 0 used all of it, 20 used takes 10 more."""
    limits = TenantLimits(tokens_per_minute=100)
    one = limiter()
    left = []
    for used in (4, 0, 10, 20, 10):
        charge = await one.enter("a", limits, 10, None)
        left.append(charge.allowance.tokens_left)
        one.leave(charge, used)
    assert left == [90, 86, 86, 76, 56]


async def test_the_longest_idle_tenant_is_forgotten_but_none_with_requests_under_way() -> None:
    """However many names clients invent, the table keeps its bound and the counts stay right."""
    limits = TenantLimits(max_in_flight=5, requests_per_minute=1)
    one = limiter(max_tenants=2)
    busy = await one.enter("busy", limits, 0, None)
    assert busy is not None
    for number in range(20):
        charge = await one.enter(f"t{number}", limits, 0, None)
        one.leave(charge, 0)
    assert one.num_in_flight("busy") == 1
    with pytest.raises(TooManyRequests):
        await one.enter("busy", limits, 0, None)  # remembered
    assert await one.enter("t0", limits, 0, None) is not None  # forgotten
    one.leave(busy, 0)
    assert one.num_in_flight("busy") == 0


async def test_the_shared_use_decides_while_it_answers() -> None:
    """Its refusal is final; without its answer this process goes on from the last levels it saw."""
    shared = ScriptedTenantUse(
        Allowance(requests_left=1.0),
        Allowance(refused_for="tenant_in_flight", retry_after_s=1.0, requests_left=1.0),
        None,
        None,
    )
    limits = TenantLimits(requests_per_minute=60)
    one = limiter(shared)
    assert await one.enter("a", limits, 0, None) is not None
    with pytest.raises(TooManyRequests):
        await one.enter("a", limits, 0, None)
    assert await one.enter("a", limits, 0, None) is not None
    with pytest.raises(TooManyRequests):
        await one.enter("a", limits, 0, None)


async def test_what_others_must_know_is_told_them() -> None:
    """The end of a request, its real use, and a request cancelled while Redis was asked."""
    shared = ScriptedTenantUse(Allowance(requests_left=1.0, tokens_left=90.0))
    limits = TenantLimits(max_in_flight=5, tokens_per_minute=100)
    one = limiter(shared)
    charge = await one.enter("a", limits, 10, None)
    one.leave(charge, 25)
    assert shared.settled == [("a", 15)]
    shared.is_stuck = True
    task = asyncio.ensure_future(one.enter("a", limits, 10, None))
    await asyncio.sleep(0)
    assert one.num_in_flight("a") == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert one.num_in_flight("a") == 0
    assert shared.settled[1:] == [("a", 0)]
