"""Places and those who wait for one, with real tasks and cancellations."""

from __future__ import annotations

import asyncio
import random

import pytest

from gateway.errors import Overloaded
from gateway.limits.gate import Gate, QueueRoom

LONG_S = 60.0


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


def waiting(gate: Gate, rank: float = 0.0, timeout_s: float = LONG_S) -> asyncio.Task[None]:
    return asyncio.ensure_future(gate.wait(rank, timeout_s))


async def test_a_free_place_is_taken_without_waiting() -> None:
    """Room for two means that two enter and a third does not."""
    gate = Gate(2, QueueRoom(10))
    assert [gate.try_enter() for _ in range(3)] == [True, True, False]
    gate.leave()
    assert gate.try_enter()


async def test_a_place_given_back_goes_to_the_first_in_line_and_to_nobody_else() -> None:
    """A newcomer in that very moment finds no room."""
    gate = Gate(1, QueueRoom(10))
    assert gate.try_enter()
    late, early = waiting(gate, rank=2.0), waiting(gate, rank=1.0)
    await settle()
    gate.leave()
    assert not gate.try_enter()
    await settle()
    assert (early.done(), late.done()) == (True, False)
    gate.leave()
    await late
    gate.leave()
    assert gate.is_unused


async def test_a_full_queue_refuses_at_once() -> None:
    """The bound is one for all gates that share the room; the refusal says when to come again."""
    room = QueueRoom(1)
    first, second = Gate(1, room), Gate(1, room)
    assert first.try_enter()
    assert second.try_enter()
    task = waiting(first)
    await settle()
    with pytest.raises(Overloaded) as caught:
        await second.wait(0.0, LONG_S)
    assert caught.value.retry_after_s is not None
    assert room.rejections == {"queue_full": 1}
    first.leave()
    await task
    assert room.num_waiting == 0


async def test_a_wait_that_is_too_long_ends_in_a_refusal() -> None:
    """After its time a waiter is gone from the line and the place goes to others."""
    room = QueueRoom(10)
    gate = Gate(1, room)
    assert gate.try_enter()
    with pytest.raises(Overloaded):
        await gate.wait(0.0, 0.0)
    assert (room.num_waiting, room.rejections) == (0, {"queue_timeout": 1})
    gate.leave()
    assert gate.is_unused


async def test_who_is_cancelled_while_waiting_leaves_the_line_at_once() -> None:
    """The next in line gets the place, and no count stays behind."""
    room = QueueRoom(10)
    gate = Gate(1, room)
    assert gate.try_enter()
    gone, stays = waiting(gate), waiting(gate)
    await settle()
    gone.cancel()
    await settle()
    assert (room.num_waiting, gone.cancelled()) == (1, True)
    gate.leave()
    await stays
    gate.leave()
    assert gate.is_unused


async def test_a_place_given_to_somebody_cancelled_in_that_moment_is_passed_on() -> None:
    """Called and cancelled before it could run: its place is not lost."""
    gate = Gate(1, QueueRoom(10))
    assert gate.try_enter()
    gone, stays = waiting(gate), waiting(gate)
    await settle()
    gate.leave()
    gone.cancel()
    await stays
    assert gone.cancelled()
    gate.leave()
    assert gate.is_unused


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_leaks_whatever_happens(seed: int) -> None:
    """Random entries, ends, cancellations and time-outs: never too many inside, and in the end nobody."""
    chance = random.Random(seed)
    room = QueueRoom(8)
    gate = Gate(3, room)
    num_inside = most_inside = 0

    async def one() -> None:
        nonlocal num_inside, most_inside
        if not gate.try_enter():
            await gate.wait(chance.random(), chance.choice((LONG_S, 0.0)))
        num_inside += 1
        most_inside = max(most_inside, num_inside)
        try:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        finally:
            num_inside -= 1
            gate.leave()

    tasks: list[asyncio.Task[None]] = []
    for _ in range(200):
        tasks.append(asyncio.ensure_future(one()))
        if chance.random() < 0.4:
            chance.choice(tasks).cancel()
        if chance.random() < 0.5:
            await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} <= {type(None), Overloaded, asyncio.CancelledError}
    assert results.count(None) > 0
    assert most_inside <= 3
    assert gate.is_unused
    assert (gate.num_inside, room.num_waiting) == (0, 0)


async def test_new_places_go_to_those_who_wait_and_lost_ones_are_not_passed_on() -> None:
    """More places: the line moves at once. Fewer: who is inside stays, nobody follows until there is room."""
    gate = Gate(1, QueueRoom(10))
    assert gate.try_enter()
    first, second, third = waiting(gate, 1.0), waiting(gate, 2.0), waiting(gate, 3.0)
    await settle()
    gate.resize(2)
    await settle()
    assert (first.done(), second.done(), gate.num_inside) == (True, False, 2)
    gate.resize(1)
    gate.leave()
    await settle()
    assert (second.done(), gate.num_inside) == (False, 1)
    gate.leave()
    await second
    gate.leave()
    await third
    gate.leave()
    assert gate.is_unused
