"""Entering requests in batches: equal to one by one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from routing.random_worlds import SETTINGS, STEPS, Step, World
from routing.routing_worlds import fleet, names, ready_router, request

from gateway.replay.recording import replay
from gateway.routing.recording import RecordedEvent, RecordingRouter
from gateway.routing.reservation import Reservation
from gateway.routing.router import Router
from gateway.routing.settings import RoutingSettings
from gateway.values import Decision, RequestFacts, Usage

SIZES = st.lists(st.sampled_from([64, 1, 2, 3, 7, 12]), min_size=1, max_size=5)


MEMOS = ("_shares", "_shares_at_s")
"""Attributes of `Candidates` that only remember what was computed; keys are identities."""


class Ledger:
    """A caller's batch: taken when the router asks, or when it is full; sizes come in turn."""

    def __init__(self, router: Router, sizes: list[int]) -> None:
        self.router = router
        self.sizes = sizes
        self.batch: list[Reservation] = []
        self.num_batches = 0
        router.drain = self.drain

    def add(self, reservation: Reservation) -> None:
        self.batch.append(reservation)
        if len(self.batch) >= self.sizes[self.num_batches % len(self.sizes)]:
            self.drain()

    def drain(self) -> None:
        batch, self.batch = self.batch, []
        self.num_batches += 1
        if batch:
            self.router.take(batch)


class BatchingWorld(World):
    """Enters requests in batches. `is_exact`: nothing is pending when a request is decided or a load seen."""

    def __init__(self, router: Router, sizes: list[int], *, is_exact: bool) -> None:
        self.ledger = Ledger(router, sizes)
        self.is_exact = is_exact
        super().__init__(router)

    def decide(self, *arguments: object) -> Decision:
        if self.is_exact:
            self.ledger.drain()
        return super().decide(*arguments)  # type: ignore[arg-type] # as they came

    def scrape(self, *numbers: int) -> None:
        if self.is_exact:
            self.ledger.drain()
        super().scrape(*numbers)

    def send(self, facts: RequestFacts, decision: Decision) -> Reservation:
        reservation = self.router.note_sent(facts, decision, self.now_s)
        self.ledger.add(reservation)
        return reservation

    def finish(self, reservation: Reservation, usage: Usage | None, completed: bool) -> None:
        self.router.note_ended(reservation, self.now_s, usage, completed)
        self.ledger.add(reservation)


def state_of(thing: object, seen: dict[int, int] | None = None) -> Iterator[object]:
    """Yield all that an object holds, depth first; what was met before as its number."""
    seen = {} if seen is None else seen
    if thing is None or isinstance(thing, int | float | str | bytes | Enum):
        yield thing
    elif id(thing) in seen:
        yield ("met", seen[id(thing)])
    else:
        seen[id(thing)] = len(seen)
        if isinstance(thing, dict):
            parts: list[object] = [part for item in thing.items() for part in item]
        elif isinstance(thing, list | tuple):
            parts = list(thing)
        elif isinstance(thing, set | frozenset):
            parts = sorted(thing)
        elif isinstance(thing, msgspec.Struct):
            parts = [msgspec.json.encode(thing)]
        elif callable(thing):
            parts = []
        else:
            names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
            names += sorted(getattr(thing, "__dict__", {}))
            parts = [part for name in names if name not in MEMOS for part in (name, getattr(thing, name))]
        yield (type(thing).__name__, len(parts))
        for part in parts:
            yield from state_of(part, seen)


def everything(router: Router) -> list[object]:
    router.drain()
    router.drain = list  # callables count as equal
    return list(state_of(router))


@settings(max_examples=200, deadline=None)
@given(STEPS, SETTINGS, SIZES)
def test_batch_equals_one_by_one(steps: list[Step], options: dict[str, float], sizes: list[int]) -> None:
    """With batches of any size all decisions and the whole state at the end are equal, bit for bit."""
    chosen = RoutingSettings(**options)  # type: ignore[arg-type] # loose test values
    single = World(Router(chosen))
    batched = BatchingWorld(Router(chosen), sizes, is_exact=True)
    single.play(steps)
    batched.play(steps)
    assert batched.decisions == single.decisions
    assert everything(batched.router) == everything(single.router)


@settings(max_examples=100, deadline=None)
@given(STEPS, SETTINGS, SIZES)
def test_recording_of_batches_replays(steps: list[Step], options: dict[str, float], sizes: list[int]) -> None:
    """Where sessions stay while a batch is pending, the recording says what had been taken."""
    lines: list[bytes] = []
    recorder = RecordingRouter(RoutingSettings(**options), lines.append)  # type: ignore[arg-type] # loose
    world = BatchingWorld(recorder, sizes, is_exact=False)
    world.play(steps)
    world.closing()
    world.ledger.drain()
    assert list(replay(lines)) == []
    assert set(recorder.loads().values()) <= {(0.0, 0)}


def test_replay_of_a_recording_in_batches() -> None:
    """A recorded run replays alike when its takes are put off and merged."""
    lines: list[bytes] = []
    recorder = RecordingRouter(RoutingSettings(), lines.append)
    World(recorder).play(
        [(kind, n, n * 7, n * 5) for n in range(60) for kind in ("burst", "wait", "end_all")]
    )
    assert list(replay(merged(lines))) == []
    assert len(merged(lines)) < len(lines)


def merged(lines: list[bytes]) -> list[bytes]:
    """Put off each take until something reads what it changes."""
    kept: list[bytes] = []
    pending: list[int] = []
    for line in lines:
        event = msgspec.json.decode(line, type=RecordedEvent)
        if event.event == "take":
            pending += event.batch
            continue
        if event.event not in ("sent", "first_token", "ended") and pending:
            kept.append(msgspec.json.encode(RecordedEvent(event="take", batch=pending)))
            pending = []
        kept.append(line)
    return kept


def _at_once(use: Callable[[Router], object]) -> int:
    router = ready_router(3)
    ledger = Ledger(router, [99])
    facts = request("s")
    ledger.add(router.note_sent(facts, router.decide(facts, None, 1000.0), 1000.0))
    use(router)
    return len(ledger.batch)


def test_router_takes_the_batch_before_it_reads_what_a_batch_changes() -> None:
    """A full decision, a view, new settings and an admin page see everything; loads always do."""
    new = request("t")
    assert _at_once(lambda router: router.decide(new, None, 1000.0)) == 0
    assert _at_once(lambda router: router.observe_view(fleet(), 1000.0)) == 0
    assert _at_once(lambda router: router.reconfigure(router.settings)) == 0
    assert _at_once(lambda router: router.snapshot()) == 0
    assert _at_once(lambda router: router.holders(new.prefix)) == 0
    assert _at_once(lambda router: [router.in_flight(name) for name in router.loads()]) == 1
    assert sum(ready_router(3).in_flight(name) for name in names(3)) == 0  # type: ignore[arg-type, misc]  # names of slots
