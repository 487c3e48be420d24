"""Record what a router was told and what it decided; play it back and compare, bit for bit.

`homing gateway --record FILE` writes one, `homing replay FILE` checks it. One JSON object a line: first the
settings, then each event with its time. Floats survive JSON exactly, so equality is equality of values, not
"close enough". A recording holds hashes and sizes, never prompt text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from gateway.errors import GatewayError
from gateway.routing.reservation import Reservation
from gateway.routing.router import Router
from gateway.routing.settings import RoutingSettings
from gateway.values import BackendId, Binding, Decision, FleetView, RequestFacts, Usage


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a recording; which fields are set depends on `event`."""

    event: str  # settings | reconfigure | view | decide | reserve | first_token | release | load | others
    now_s: float = 0.0
    settings: RoutingSettings | None = None
    view: FleetView | None = None
    facts: RequestFacts | None = None
    binding: Binding | None = None
    excluded: list[BackendId] = []
    avoided: list[BackendId] = []
    by_ring: bool = False
    decision: Decision | None = None  # what was decided; None: an error
    error: str | None = None  # its code
    number: int = 0  # of the reservation
    usage: Usage | None = None
    completed: bool = False
    backend_id: BackendId | None = None
    load: tuple[int, int, float] | None = None  # running, waiting, KV usage
    others: dict[BackendId, tuple[float, int]] | None = None  # what other replicas have outstanding


class RecordingRouter(Router):
    """A router that hands on each call made to it, and each decision, as a line."""

    def __init__(self, settings: RoutingSettings, write_line: Callable[[bytes], object]) -> None:
        super().__init__(settings)
        self._write_line = write_line
        self._numbers: dict[Reservation, int] = {}
        self._next_number = 0
        self._write(Entry(event="settings", settings=settings))

    def _write(self, entry: Entry) -> None:
        self._write_line(msgspec.json.encode(entry))

    def reconfigure(self, settings: RoutingSettings) -> None:
        super().reconfigure(settings)
        self._write(Entry(event="reconfigure", settings=settings))

    def observe_view(self, view: FleetView, now_s: float) -> None:
        super().observe_view(view, now_s)
        self._write(Entry(event="view", now_s=now_s, view=view))

    def observe_load(
        self, backend_id: BackendId, *, num_running: int, num_waiting: int, kv_usage: float, now_s: float
    ) -> None:
        super().observe_load(
            backend_id, num_running=num_running, num_waiting=num_waiting, kv_usage=kv_usage, now_s=now_s
        )
        load = (num_running, num_waiting, kv_usage)
        self._write(Entry(event="load", now_s=now_s, backend_id=backend_id, load=load))

    def decide(
        self,
        facts: RequestFacts,
        binding: Binding | None,
        now_s: float,
        *,
        excluded: frozenset[BackendId] = frozenset(),
        avoided: frozenset[BackendId] = frozenset(),
        by_ring: bool = False,
    ) -> Decision:
        asked = Entry(
            event="decide",
            now_s=now_s,
            facts=facts,
            binding=binding,
            excluded=sorted(excluded),
            avoided=sorted(avoided),
            by_ring=by_ring,
        )
        try:
            decision = super().decide(
                facts, binding, now_s, excluded=excluded, avoided=avoided, by_ring=by_ring
            )
        except GatewayError as error:
            self._write(msgspec.structs.replace(asked, error=error.code))
            raise
        self._write(msgspec.structs.replace(asked, decision=decision))
        return decision

    def observe_others(self, loads: Mapping[BackendId, tuple[float, int]], now_s: float) -> None:
        super().observe_others(loads, now_s)
        self._write(Entry(event="others", now_s=now_s, others=dict(loads)))

    def reserve(
        self, facts: RequestFacts, decision: Decision, now_s: float, *, backend_id: BackendId | None = None
    ) -> Reservation:
        reservation = super().reserve(facts, decision, now_s, backend_id=backend_id)
        number = self._numbers[reservation] = self._next_number
        self._next_number += 1
        self._write(
            Entry(
                event="reserve",
                now_s=now_s,
                facts=facts,
                decision=decision,
                backend_id=backend_id,
                number=number,
            )
        )
        return reservation

    def first_token(self, reservation: Reservation, now_s: float) -> None:
        super().first_token(reservation, now_s)
        self._write(Entry(event="first_token", now_s=now_s, number=self._numbers[reservation]))

    def release(self, reservation: Reservation, now_s: float, usage: Usage | None, completed: bool) -> None:
        super().release(reservation, now_s, usage, completed)
        number = self._numbers.pop(reservation)
        self._write(Entry(event="release", now_s=now_s, number=number, usage=usage, completed=completed))


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """A decision that came out differently."""

    line: int
    recorded: Decision | str | None
    replayed: Decision | str


def replay(lines: Iterable[bytes]) -> Iterator[Mismatch]:
    """Play a recording into a new router and yield every decision that differs. Raises ValueError."""
    decoder = msgspec.json.Decoder(Entry)
    router: Router | None = None
    held: dict[int, Reservation] = {}
    for number, line in enumerate(lines, start=1):
        entry = decoder.decode(line)
        if entry.settings is not None and entry.event == "settings":
            router = Router(entry.settings)
            continue
        if router is None:
            raise ValueError(f"line {number}: a recording begins with its settings")
        if entry.event == "decide":
            replayed = _decide(router, entry)
            recorded = entry.decision or entry.error
            if replayed != recorded:
                yield Mismatch(line=number, recorded=recorded, replayed=replayed)
        else:
            _apply(router, entry, held)


def _decide(router: Router, entry: Entry) -> Decision | str:
    assert entry.facts is not None
    try:
        return router.decide(
            entry.facts,
            entry.binding,
            entry.now_s,
            excluded=frozenset(entry.excluded),
            avoided=frozenset(entry.avoided),
            by_ring=entry.by_ring,
        )
    except GatewayError as error:
        return error.code


def _apply(router: Router, entry: Entry, held: dict[int, Reservation]) -> None:
    """Tell the router one event that is not a question."""
    if entry.settings is not None:
        router.reconfigure(entry.settings)
    elif entry.view is not None:
        router.observe_view(entry.view, entry.now_s)
    elif entry.load is not None and entry.backend_id is not None:
        running, waiting, usage = entry.load
        router.observe_load(
            entry.backend_id, num_running=running, num_waiting=waiting, kv_usage=usage, now_s=entry.now_s
        )
    elif entry.others is not None:
        router.observe_others(entry.others, entry.now_s)
    elif entry.event == "reserve":
        assert entry.facts is not None
        assert entry.decision is not None
        held[entry.number] = router.reserve(
            entry.facts, entry.decision, entry.now_s, backend_id=entry.backend_id
        )
    elif entry.event == "first_token":
        router.first_token(held[entry.number], entry.now_s)
    elif entry.event == "release":
        router.release(held.pop(entry.number), entry.now_s, entry.usage, entry.completed)
    else:
        raise ValueError(f"unknown event {entry.event!r}")
