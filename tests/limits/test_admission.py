"""Admission of requests to the process and to single backends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from gateway.errors import NoBackend, Overloaded
from gateway.limits.admission import Admission, QueueTicket
from gateway.limits.settings import LimitSettings
from gateway.values import (
    Affinity,
    Backend,
    BackendId,
    BackendState,
    Candidate,
    Decision,
    FleetView,
    KeySource,
)

A, B = BackendId("a"), BackendId("b")


def admission(now_s: float = 0.0, **options: Any) -> Admission:
    return Admission(LimitSettings(**options), clock=lambda: now_s)


def decision(backend_id: BackendId) -> Decision:
    return Decision(
        backend_id=backend_id,
        affinity=Affinity.NEW,
        reason="new_placement",
        ranked=(Candidate(backend_id=backend_id, price=0.0),),
        key_source=KeySource.HEADER,
    )


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_can_neither_run_nor_wait_is_refused_at_arrival() -> None:
    """The bound is places and queue together; the refusal is counted."""
    one = admission(max_in_flight=2, queue_size=1)
    one.check_arrival(3)
    with pytest.raises(Overloaded):
        one.check_arrival(4)
    assert one.room.rejections == {"in_flight": 1}


def test_follow_ups_and_priority_lead_and_time_makes_up_for_it() -> None:
    """A lead is a number of seconds: longer waiting beats it."""
    early, late = admission(0.0, queue_priority_step_s=5.0), admission(6.0, queue_priority_step_s=5.0)
    new = early.ticket(is_follow_up=False)
    assert early.ticket(is_follow_up=True).rank < new.rank
    assert late.ticket(is_follow_up=True).rank > new.rank
    assert late.ticket(is_follow_up=True, priority=1).rank < new.rank


async def test_a_full_backend_is_avoided_and_waited_for() -> None:
    """Its place goes to who waits for it, who then decides again with the place held."""
    one = admission(max_in_flight_per_backend=1)
    ticket = one.ticket(is_follow_up=True)
    await one.choose(lambda: decision(A), ticket)
    assert one.avoided(0.0) == {A}
    decided: list[int] = []

    def decide() -> Decision:
        decided.append(1)
        return decision(A)

    waiter = asyncio.ensure_future(one.choose(decide, ticket))
    await settle()
    assert not waiter.done()
    one.leave_backend(A)
    assert (await waiter).backend_id == A
    assert len(decided) == 2
    one.leave_backend(A)
    assert one.avoided(0.0) == frozenset()


async def test_a_decision_that_changed_while_waiting_gives_its_place_back() -> None:
    """Who waited for one backend and is then sent to another holds one place only, there."""
    one = admission(max_in_flight_per_backend=1)
    ticket = one.ticket(is_follow_up=True)
    await one.choose(lambda: decision(A), ticket)
    answers = iter((A, B))
    waiter = asyncio.ensure_future(one.choose(lambda: decision(next(answers)), ticket))
    await settle()
    one.leave_backend(A)
    assert (await waiter).backend_id == B
    assert one.avoided(0.0) == {B}
    one.leave_backend(B)
    assert one.avoided(0.0) == frozenset()


@pytest.mark.parametrize("state", [BackendState.DOWN, None])
async def test_nobody_waits_for_a_backend_that_has_gone(state: BackendState | None) -> None:
    """Its places may come free only when requests to a silent machine time out: who waits decides again."""
    one = admission(max_in_flight_per_backend=1)
    ticket = one.ticket(is_follow_up=True)
    await one.choose(lambda: decision(A), ticket)
    homes = [A]
    waiter = asyncio.ensure_future(one.choose(lambda: decision(homes[0]), ticket))
    await settle()
    homes[0] = B
    backend = Backend(backend_id=A, base_url="http://a", state=BackendState.READY)
    one.observe_view(FleetView(backends={A: backend}))
    await settle()
    assert not waiter.done()
    gone = {} if state is None else {A: replace(backend, state=state)}
    one.observe_view(FleetView(backends=gone))
    assert (await waiter).backend_id == B
    assert one.room.num_waiting == 0
    one.leave_backend(A)
    one.leave_backend(B)
    assert one.avoided(0.0) == frozenset()


async def test_a_failed_second_decision_leaves_nothing_behind() -> None:
    """The fleet may be gone by the time a place is free."""
    one = admission(max_in_flight_per_backend=1)
    ticket = one.ticket(is_follow_up=True)
    await one.choose(lambda: decision(A), ticket)
    answers = iter((A,))

    def decide() -> Decision:
        try:
            return decision(next(answers))
        except StopIteration:
            raise NoBackend("none left") from None

    waiter = asyncio.ensure_future(one.choose(decide, ticket))
    await settle()
    one.leave_backend(A)
    with pytest.raises(NoBackend):
        await waiter
    assert one.avoided(0.0) == frozenset()


async def test_waiting_for_a_backend_can_be_cancelled_and_times_out() -> None:
    """Neither leaves a place taken or a waiter counted."""
    one = admission(max_in_flight_per_backend=1, queue_timeout_s=0.0)
    ticket = one.ticket(is_follow_up=True)
    await one.choose(lambda: decision(A), ticket)
    with pytest.raises(Overloaded):
        await one.choose(lambda: decision(A), ticket)
    waiter = asyncio.ensure_future(one.choose(lambda: decision(A), QueueTicket(0.0, 60.0)))
    await settle()
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert one.room.num_waiting == 0
    one.leave_backend(A)
    assert one.avoided(0.0) == frozenset()


async def test_a_waiter_that_times_out_as_the_last_place_is_given_back_leaves_cleanly() -> None:
    """Its gate is gone by the time it hears of its time-out."""
    one = admission(max_in_flight_per_backend=1, queue_timeout_s=0.0)
    ticket = one.ticket(is_follow_up=True)
    await one.choose(lambda: decision(A), ticket)
    waiter = asyncio.ensure_future(one.choose(lambda: decision(A), ticket))
    await asyncio.sleep(0)  # its timer is set now, and runs just before the next
    asyncio.get_running_loop().call_later(0, one.leave_backend, A)
    with pytest.raises(Overloaded):
        await waiter
    assert one.avoided(0.0) == frozenset()
    assert one.try_enter_backend(A)


@pytest.mark.parametrize(
    "options",
    [
        {"max_in_flight": 0},
        {"queue_size": -1},
        {"max_in_flight_per_backend": 0},
        {"max_in_flight_per_backend": 4, "queue_size": 0},
        {"queue_timeout_s": -1.0},
        {"queue_priority_step_s": float("nan")},
        {"max_retry_after_s": float("inf")},
        {"per_tenant": {"requests_per_minute": 0}},
    ],
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    """The error comes at start and names the option."""
    with pytest.raises(msgspec.ValidationError, match=next(iter(options))):
        msgspec.convert(options, LimitSettings)
