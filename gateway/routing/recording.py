"""Writes down what a router was told and what it decided, so that `gateway.replay.recording` can repeat it.

`homing gateway --record FILE` writes a recording. Each line is one JSON object: first the settings, then
each event with its time. Floats survive JSON exactly, so a replay can compare values bit for bit. A recording
holds hashes and sizes, never prompt text. This module only makes the lines; the caller stores them.

A request that is entered at once is recorded as `sent` (or `ended`) and a `take` of its own. Older recordings
say `reserve` and `release` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from gateway.errors import GatewayError
from gateway.routing.news import News
from gateway.routing.policy_registry import POLICIES, PolicyFactory
from gateway.routing.reservation import Reservation
from gateway.routing.router import Router
from gateway.routing.settings import RoutingSettings
from gateway.values import BackendId, Binding, Decision, FleetView, RequestFacts, Usage


class RecordedEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a recording; which fields are set depends on `event`."""

    event: (
        str  # settings | reconfigure | view | decide | sent | first_token | ended | take | load | others, …
    )
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
    batch: list[int] = []  # numbers of what is taken, in order
    usage: Usage | None = None
    completed: bool = False
    backend_id: BackendId | None = None
    load: tuple[int, int, float] | None = None  # running, waiting, KV usage
    others: dict[BackendId, tuple[float, int]] | None = None  # what other replicas have outstanding
    news: News | None = None  # what another replica has sent


class RecordingRouter(Router):
    """A router that passes each call made to it, and each decision, to `write_line` as one line."""

    def __init__(
        self,
        settings: RoutingSettings,
        write_line: Callable[[bytes], object],
        *,
        policies: Mapping[str, PolicyFactory] = POLICIES,
    ) -> None:
        super().__init__(settings, policies=policies)
        self._write_line = write_line
        self._numbers: dict[Reservation, int] = {}
        self._next_number = 0
        self._write(RecordedEvent(event="settings", settings=settings))

    def _write(self, event: RecordedEvent) -> None:
        self._write_line(msgspec.json.encode(event))

    def reconfigure(self, settings: RoutingSettings) -> None:
        super().reconfigure(settings)
        self._write(RecordedEvent(event="reconfigure", settings=settings))

    def observe_view(self, view: FleetView, now_s: float) -> None:
        super().observe_view(view, now_s)
        self._write(RecordedEvent(event="view", now_s=now_s, view=view))

    def observe_load(
        self, backend_id: BackendId, *, num_running: int, num_waiting: int, kv_usage: float, now_s: float
    ) -> None:
        super().observe_load(
            backend_id, num_running=num_running, num_waiting=num_waiting, kv_usage=kv_usage, now_s=now_s
        )
        load = (num_running, num_waiting, kv_usage)
        self._write(RecordedEvent(event="load", now_s=now_s, backend_id=backend_id, load=load))

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
        asked = RecordedEvent(
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
        self._write(RecordedEvent(event="others", now_s=now_s, others=dict(loads)))

    def observe_news(self, news: News, now_s: float) -> None:
        super().observe_news(news, now_s)
        self._write(RecordedEvent(event="news", now_s=now_s, news=news))

    def note_sent(
        self, facts: RequestFacts, decision: Decision, now_s: float, *, backend_id: BackendId | None = None
    ) -> Reservation:
        reservation = super().note_sent(facts, decision, now_s, backend_id=backend_id)
        number = self._numbers[reservation] = self._next_number
        self._next_number += 1
        self._write(
            RecordedEvent(
                event="sent",
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
        self._write(RecordedEvent(event="first_token", now_s=now_s, number=self._numbers[reservation]))

    def note_ended(
        self, reservation: Reservation, now_s: float, usage: Usage | None, completed: bool
    ) -> None:
        super().note_ended(reservation, now_s, usage, completed)
        number = self._numbers[reservation]
        self._write(
            RecordedEvent(event="ended", now_s=now_s, number=number, usage=usage, completed=completed)
        )

    def take(self, batch: Sequence[Reservation]) -> None:
        super().take(batch)
        self._write(RecordedEvent(event="take", batch=[self._numbers[reservation] for reservation in batch]))
        for reservation in batch:
            if reservation.num_taken == 2:
                self._numbers.pop(reservation, None)
