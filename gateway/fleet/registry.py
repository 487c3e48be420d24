"""The fleet: which backends exist, what is known about them, and the one `FleetView` that routing sees.

All changes go through `Fleet` and end in a new immutable view, published in one step, so no request sees half
a change. What an operator asked for (cordon, drain) and what was observed (health) are kept apart, and
`_state_of` combines them: a draining backend that dies is down, and is draining again when it comes back.
Health says how each backend stands; `spared` says which of them stay all the same, for their pool's sake.

Epochs. A backend's cache lives as long as its process. If the engine reports its start time, the epoch is
that time (wall clock, whole seconds), so that all replicas of the gateway use the same epoch. Otherwise, when
a counter goes backwards the epoch becomes the time of that scrape. Replicas may then differ by a scrape
interval, which is why routing treats a cache as lost only if a binding has a *smaller* epoch.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gateway.errors import NotFound
from gateway.fleet.engine_metrics import EngineReport
from gateway.fleet.model_list import ModelCard, merge
from gateway.observability.logs import log_event
from gateway.routing.health import HealthSettings, HealthTable, Outcome, is_our_own, is_refusal
from gateway.routing.standing import Member, Standing, spared
from gateway.values import Backend, BackendId, BackendState, FleetView

Clock = Callable[[], float]


@dataclass(slots=True)
class _Row:
    """The mutable record of one backend, private to this module."""

    backend: Backend
    api_key: str | None = None
    wants: BackendState | None = None  # CORDONED or DRAINING when an operator asked
    drain_deadline_s: float | None = None
    drained_epoch: int | None = None  # the drain ends when the backend has a later epoch
    report: EngineReport = field(default_factory=EngineReport)
    reported_s: float = 0.0
    cards: tuple[ModelCard, ...] = ()
    is_asleep: bool = False

    @property
    def is_open(self) -> bool:
        return self.wants is None and self.backend.weight > 0 and not self.is_asleep


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """One change of a backend's state."""

    backend_id: BackendId
    before: BackendState
    after: BackendState
    reason: str


class Fleet:
    """All backends. Every mutating method publishes a new view before it returns."""

    def __init__(
        self,
        health: HealthSettings,
        *,
        clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
    ) -> None:
        self.view = FleetView()
        self.health = HealthTable(health)
        self.spared: frozenset[BackendId] = frozenset()  # in service though their health is bad
        self._rows: dict[BackendId, _Row] = {}
        self._view_observers: list[Callable[[FleetView], None]] = []
        self._change_observers: list[Callable[[StateChange], None]] = []
        self._clock, self._wall_clock = clock, wall_clock
        self._is_in_one_change = False
        self._has_been_ready = False
        self._begun_s = clock()

    def __repr__(self) -> str:
        states = Counter(backend.state.value for backend in self.view.backends.values())
        counts = ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "empty"
        return f"<Fleet generation {self.view.generation}: {counts}>"

    def add_view_observer(self, observer: Callable[[FleetView], None]) -> None:
        """Call this with every view from now on, in the order in which observers were added."""
        self._view_observers.append(observer)

    def add_change_observer(self, observer: Callable[[StateChange], None]) -> None:
        """Call this with every change of a backend's state, after the view that contains it."""
        self._change_observers.append(observer)

    def reconfigure(self, health: HealthSettings) -> None:
        """Use these health rules from now on; the evidence so far is kept."""
        self.health.settings = health

    # -- membership

    @contextmanager
    def one_change(self, reason: str) -> Iterator[None]:
        """Publish all changes made in this block as one view: building one is slow for a large fleet."""
        self._is_in_one_change = True
        try:
            yield
        finally:
            self._is_in_one_change = False
            self._publish(reason)

    def add(self, backend: Backend, *, api_key: str | None = None) -> None:
        """Add a backend, or update the configured part of a known one; its health is kept."""
        now_s = self._clock()
        row = self._rows.get(backend.backend_id)
        if row is not None and row.backend.base_url == backend.base_url:
            row.backend = replace(
                row.backend,
                rank=backend.rank,
                weight=backend.weight,
                labels=backend.labels,
                engine=backend.engine,
                kv_capacity_tokens=backend.kv_capacity_tokens or row.backend.kv_capacity_tokens,
                kv_block_tokens=row.backend.kv_block_tokens,
            )
            row.api_key = api_key
        else:
            if row is not None:  # same name, other address: a different cache
                self.health.forget(backend.backend_id)
            self._rows[backend.backend_id] = _Row(backend=replace(backend, since_s=now_s), api_key=api_key)
        self._publish("configured")

    def remove(self, backend_id: BackendId) -> None:
        """Take a backend out at once; its sessions move at their next turn."""
        row = self._row(backend_id)
        del self._rows[backend_id]
        self.health.forget(backend_id)
        self._report_change(
            StateChange(
                backend_id=backend_id,
                before=row.backend.state,
                after=BackendState.REMOVED,
                reason="removed",
            )
        )
        self._publish("removed")

    def set_weight(self, backend_id: BackendId, weight: float) -> None:
        row = self._row(backend_id)
        row.backend = replace(row.backend, weight=weight)
        self._publish("weight")

    # -- what an operator asks for

    def cordon(self, backend_id: BackendId) -> None:
        """No new sessions; bound ones stay."""
        row = self._row(backend_id)
        row.wants, row.drained_epoch = BackendState.CORDONED, None
        self._publish("cordon")

    def drain(self, backend_id: BackendId, deadline_s: float, *, epoch: int | None = None) -> None:
        """No new sessions; bound ones move at their next turn, at the latest after the deadline.

        With an epoch the drain ends when the backend restarts, that is when it has a later epoch.
        """
        row = self._row(backend_id)
        row.wants, row.drain_deadline_s = BackendState.DRAINING, self._clock() + deadline_s
        row.drained_epoch = epoch
        self._end_drain_of_earlier_life(row)
        self._publish("drain")

    def undrain(self, backend_id: BackendId) -> None:
        """Take back a cordon or a drain."""
        row = self._row(backend_id)
        row.wants, row.drain_deadline_s, row.drained_epoch = None, None, None
        self._publish("undrain")

    # -- what was observed

    def observe_probe(
        self, backend_id: BackendId, outcome: Outcome, cause: str = "probe", *, is_answering: bool = False
    ) -> None:
        """Count a probe. `is_answering`: the backend has delivered bytes of an answer lately.

        A share of failures is judged here too, and not at each request: it needs the other backends' shares.
        """
        if backend_id not in self._rows:
            return
        now_s = self._clock()
        has_changed = self.health.observe_probe(
            backend_id, outcome, now_s, is_refused=is_refusal(cause), is_answering=is_answering
        )
        if self.health.failure_share(backend_id, now_s) is not None:
            peers = self._peers(backend_id)
            if self.health.compare_share(backend_id, peers, now_s):
                has_changed, cause = True, "failure_share"
        if has_changed:
            self._publish(cause)

    def observe_outcome(self, backend_id: BackendId, outcome: Outcome, cause: str = "requests") -> None:
        """Count a request. `cause` of a failure: `status_503`, or the code of an UpstreamError."""
        now_s = self._clock()
        if outcome is not Outcome.FAILURE:
            has_changed = self.health.observe_outcome(backend_id, outcome, now_s)
        elif is_our_own(cause):
            return
        else:
            is_refused = is_refusal(cause)
            has_changed = self.health.observe_outcome(backend_id, outcome, now_s, is_refused=is_refused)
        if has_changed:
            self._publish(cause)

    def _peers(self, backend_id: BackendId) -> list[BackendId]:
        """The backends that share a model with this one. O(backends)."""
        models = self._rows[backend_id].backend.models
        return [
            peer_id
            for peer_id, row in self._rows.items()
            if models is None or row.backend.models is None or models & row.backend.models
        ]

    def observe_models(self, backend_id: BackendId, cards: Iterable[ModelCard]) -> None:
        """Take over what a backend lists."""
        row, cards = self._rows.get(backend_id), tuple(cards)
        if row is None or (row.backend.models is not None and row.cards == cards):
            return
        row.cards = cards
        row.backend = replace(
            row.backend,
            models=frozenset(card.id for card in cards),
            context_tokens={card.id: card.context_tokens for card in cards if card.context_tokens},
        )
        self._publish("models")

    def observe_sleep(self, backend_id: BackendId, *, is_asleep: bool) -> None:
        """Take over whether an engine sleeps. One that wakes up has lost its cache: a new epoch."""
        row = self._rows.get(backend_id)
        if row is None or row.is_asleep == is_asleep:
            return
        row.is_asleep = is_asleep
        if not is_asleep:
            epoch = max(row.backend.epoch + 1, int(self._wall_clock()))
            row.backend = replace(row.backend, epoch=epoch, since_s=self._clock())
        self._publish("asleep" if is_asleep else "awake")

    def observe_report(self, backend_id: BackendId, report: EngineReport) -> None:
        """Apply one scrape. The epoch changes when the process has restarted or its counters were reset."""
        row = self._rows.get(backend_id)
        if row is None:
            return
        epoch = self._epoch_of(row, report)
        capacity = report.kv_capacity_tokens or row.backend.kv_capacity_tokens
        block_tokens = report.kv_block_tokens or row.backend.kv_block_tokens
        row.report, row.reported_s = report, self._clock()
        told, known = (epoch, capacity, block_tokens), row.backend
        if told != (known.epoch, known.kv_capacity_tokens, known.kv_block_tokens):
            is_new_life = epoch != row.backend.epoch and row.backend.epoch != 0
            row.backend = replace(
                row.backend,
                epoch=epoch,
                kv_capacity_tokens=capacity,
                kv_block_tokens=block_tokens,
                since_s=self._clock() if is_new_life else row.backend.since_s,
            )
            self._end_drain_of_earlier_life(row)
            self._publish("new_epoch")

    @staticmethod
    def _end_drain_of_earlier_life(row: _Row) -> None:
        if row.drained_epoch is not None and row.backend.epoch > row.drained_epoch:
            row.wants, row.drain_deadline_s, row.drained_epoch = None, None, None

    def _epoch_of(self, row: _Row, report: EngineReport) -> int:
        if report.start_time_s is not None:
            # never backwards: a clock set back on the engine's host must not restore an old epoch
            return max(row.backend.epoch, int(report.start_time_s))
        before, after = row.report.prefix_queries, report.prefix_queries
        if before is not None and after is not None and after < before:
            return int(self._wall_clock())
        return row.backend.epoch

    # -- reading

    def api_key(self, backend_id: BackendId) -> str | None:
        row = self._rows.get(backend_id)
        return row.api_key if row else None

    def report(self, backend_id: BackendId) -> EngineReport:
        row = self._rows.get(backend_id)
        return row.report if row else EngineReport()

    def model_cards(self) -> dict[str, ModelCard]:
        """Return the models that can be had now, by name."""
        rows = [row for row in self._rows.values() if row.backend.state.is_routable]
        return merge(card for row in rows for card in row.cards)

    def has_queue(self, backend_id: BackendId) -> bool:
        """Whether requests wait in the engine's own queue, by its last metrics; False if they are old."""
        row = self._rows.get(backend_id)
        if row is None or self._clock() - row.reported_s > 2 * self.health.settings.life_s:
            return False
        waiting = row.report.num_waiting
        return bool(row.report.num_running if waiting is None else waiting)

    @property
    def has_settled(self) -> bool:
        """Whether it is known by now if a backend is ready: one has been, or all have had the time."""
        health = self.health.settings
        first_probes_s = health.unhealthy_after * (health.probe_timeout_s + health.suspect_interval_s)
        return self._has_been_ready or self._clock() - self._begun_s >= first_probes_s

    def drain_left_s(self, backend_id: BackendId) -> float | None:
        """Return the seconds until the drain deadline, None if not draining."""
        row = self._rows.get(backend_id)
        if row is None or row.drain_deadline_s is None:
            return None
        return max(0.0, row.drain_deadline_s - self._clock())

    def _row(self, backend_id: BackendId) -> _Row:
        row = self._rows.get(backend_id)
        if row is None:
            known = ", ".join(sorted(self._rows)) or "none"
            raise NotFound(f"no backend {backend_id!r}; known: {known}")
        return row

    # -- publishing

    def _state_of(self, row: _Row) -> BackendState:
        backend_id = row.backend.backend_id
        standing = self.health.standing(backend_id)
        if standing is Standing.NEW:
            return BackendState.JOINING
        is_well = standing is Standing.WELL or backend_id in self.spared
        if not is_well and standing is not Standing.ON_TRIAL:
            return BackendState.DOWN
        if row.is_asleep:
            return BackendState.SLEEPING
        return row.wants or (BackendState.READY if is_well else BackendState.DEGRADED)

    def _publish(self, reason: str) -> None:
        """Build the new view and pass it to the observers. O(backends)."""
        if self._is_in_one_change:
            return
        now_s = self._clock()
        self._spare()
        changes = []
        backends: dict[BackendId, Backend] = {}
        for backend_id, row in self._rows.items():
            before, after = row.backend.state, self._state_of(row)
            if before is not after:
                changes.append(StateChange(backend_id=backend_id, before=before, after=after, reason=reason))
                row.backend = replace(row.backend, state=after, since_s=now_s)
                self._has_been_ready |= after is BackendState.READY
            backends[backend_id] = row.backend
        # a new dict per view, never changed afterwards
        self.view = FleetView(generation=self.view.generation + 1, backends=backends)
        for observe in self._view_observers:
            observe(self.view)
        for change in changes:
            self._report_change(change)

    def _spare(self) -> None:
        """Find out who stays in service in spite of bad health, and say when that begins and ends."""
        before, self.spared = self.spared, frozenset()
        if self.health.is_any_doubtful():
            members = (
                Member(
                    backend_id=backend_id,
                    models=row.backend.models,
                    standing=self.health.standing(backend_id),
                    is_open=row.is_open,
                )
                for backend_id, row in self._rows.items()
            )
            self.spared = spared(members, self.health.settings.panic_threshold)
        if self.spared and not before:
            log_event(
                "health_not_believed",
                level=logging.WARNING,
                backends=sorted(self.spared)[:20],
                advice="their probes or requests fail, but too few others would be left: they stay",
            )
        elif before and not self.spared:
            log_event("health_believed_again")

    def _report_change(self, change: StateChange) -> None:
        for observe in self._change_observers:
            observe(change)
        log_event(
            "backend_state",
            backend=change.backend_id,
            before=change.before.value,
            after=change.after.value,
            reason=change.reason,
        )
