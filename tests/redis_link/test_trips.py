"""What a tick counts: the silence of Redis, the queue for our places, and when a trip ends."""

from __future__ import annotations

import asyncio

from gateway.redis_link.trips import Trip, Trips
from gateway.values import StoreBudget

TICK_S = 0.001  # the least: a budget of 10 ms in ten ticks


class ScriptedSocket:
    """A connection that owes an answer, or not."""

    def __init__(self, *, owes_answer: bool = True) -> None:
        self.owes_answer = owes_answer
        self.num_aborted = 0

    def abort(self) -> None:
        self.num_aborted += 1


async def nothing() -> None:
    """An operation; these tests do not run it."""


def new_trip(socket: ScriptedSocket | None = None, *, silence_s: float = 0.01, total_s: float = 10) -> Trip:
    trip = Trip(0, nothing, StoreBudget(silence_s, total_s))
    trip.socket = socket
    return trip


class Bench:
    """Trips through the given number of places, which are started and given up in name only."""

    def __init__(self, num_places: int = 1, patience_s: float = 10) -> None:
        self.started: list[Trip] = []
        self.trips = Trips(
            num_places,
            budget_s=0.01,
            patience_s=patience_s,
            start=self.started.append,
            give_up=lambda trip: trip.end("given up"),
        )


async def test_only_silence_between_two_ticks_counts() -> None:
    """A wait that was not there at the tick before, and an answer that has arrived, count nothing."""
    socket = ScriptedSocket()
    trip = new_trip(socket)
    counted = []
    for socket.owes_answer in (True, False, True, True, True, False, True):
        counted.append(trip.note_tick(1.0))
    assert counted == [False, False, False, True, True, False, False]
    assert trip.silent_s == 2.0
    assert trip.budget.total_s == 3.0


async def test_no_connection_in_use_is_no_silence() -> None:
    """What a command does before it is sent and after it is answered is our own work."""
    trip = new_trip()
    assert not any(trip.note_tick(1.0) for _ in range(5))
    assert trip.silent_s == 0.0


async def test_trip_that_is_given_up_charges_no_more() -> None:
    """The command goes on, but its caller's budget is the caller's again."""
    trip = new_trip(ScriptedSocket(), silence_s=100.0)
    trip.end("given up")
    for _ in range(5):
        trip.note_tick(1.0)
    assert (trip.budget.silence_s, trip.budget.total_s) == (100.0, 10)
    assert trip.silent_s == 4.0


async def test_silent_redis_ends_who_is_under_way_and_who_queues() -> None:
    """Both give up when Redis has been silent for a budget."""
    bench = Bench()
    under_way, queueing = new_trip(ScriptedSocket()), new_trip()
    bench.trips.enter(under_way)
    bench.trips.enter(queueing)
    assert bench.started == [under_way]
    assert await under_way.outcome == "given up"
    assert await queueing.outcome == "given up"
    bench.trips.close()


async def test_queue_goes_on_while_redis_answers_others() -> None:
    """Each answer lets the next in, in order; nobody is given up though all wait longer than a budget."""
    bench = Bench()
    trips = [new_trip(ScriptedSocket()) for _ in range(6)]
    for trip in trips:
        bench.trips.enter(trip)
    for trip in trips:
        await asyncio.sleep(4 * TICK_S)
        bench.trips.leave(trip)
        trip.end("answered")
    assert bench.started == trips
    assert bench.trips.num_under_way == 0


async def test_callers_that_left_the_queue_take_no_place() -> None:
    """A place goes to the next that still waits for it."""
    bench = Bench()
    first, gone, last = new_trip(ScriptedSocket()), new_trip(), new_trip()
    for trip in (first, gone, last):
        bench.trips.enter(trip)
    gone.outcome.cancel()
    bench.trips.leave(first)
    assert bench.started == [first, last]
    bench.trips.close()


async def test_queue_has_an_end_though_redis_answers() -> None:
    """`total_s` bounds the wait for a place."""
    bench = Bench()
    bench.trips.enter(new_trip(ScriptedSocket(owes_answer=False)))
    queueing = new_trip(total_s=0.005)
    bench.trips.enter(queueing)
    assert await queueing.outcome == "given up"
    bench.trips.close()


async def test_connection_that_hangs_is_closed() -> None:
    """After `patience_s` of silence who waits on it gets an error, with or without its caller."""
    bench = Bench(patience_s=0.02)
    socket = ScriptedSocket()
    bench.trips.enter(new_trip(socket))
    while not socket.num_aborted:
        await asyncio.sleep(TICK_S)
    bench.trips.close()
