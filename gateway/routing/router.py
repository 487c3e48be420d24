"""One decision: which backend serves this request. Pure reading in `decide`; events change the state.

The order of calls: `observe_view` whenever the fleet changed; per request `decide`, then `reserve`
without an await between, `first_token` when the answer begins, and `release` exactly once. The same
events in the same order give the same decisions, bit for bit: no clock, no chance, no I/O in here.

Invariants: a decision names a routable backend that serves the model and is not excluded; in-flight and
outstanding work are never negative and are zero when every reservation is released.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from itertools import islice

from gateway.errors import NoBackend
from gateway.routing.calibration import CostModel, TokenRatio
from gateway.routing.candidates import Candidates
from gateway.routing.learning import Learner
from gateway.routing.load import LoadTable
from gateway.routing.placement_request import (
    PlacementRequest,
    Policy,
    RoutingState,
    measure_prompt,
    session_line,
)
from gateway.routing.policies.registry import POLICIES, PolicyFactory, make_policy
from gateway.routing.reservation import Reservation
from gateway.routing.ring import Ring
from gateway.routing.selection import Selector, name_choice
from gateway.routing.settings import FIXED_WHILE_RUNNING, RoutingSettings
from gateway.routing.shadow import Chain, ContentIndex, Shadow
from gateway.routing.slow_start import SlowStart
from gateway.routing.traffic import Traffic
from gateway.values import (
    Affinity,
    Backend,
    BackendId,
    Binding,
    Decision,
    FleetView,
    RequestFacts,
    Usage,
)


class Router:
    """All placement state of one gateway process."""

    def __init__(
        self,
        settings: RoutingSettings,
        *,
        policies: Mapping[str, PolicyFactory] = POLICIES,
        content: Callable[[Shadow], ContentIndex] | None = None,
    ) -> None:
        """`settings.policy` names one of `policies`. `content` may put another index in place of the shadow.

        Raises ValueError if `policies` lacks that name.
        """
        self.settings = settings
        self._candidates = Candidates(settings)
        self._load = LoadTable(settings)
        self._costs = CostModel(settings)
        self._traffic = Traffic(settings)
        self._tokens = TokenRatio(settings)
        self._shadow = Shadow(settings.shadow_entries_per_backend)
        self._learner = Learner(settings, self._shadow, self._costs, self._tokens)
        self._lives: list[int] = []
        self._slow_start = SlowStart()
        self._selector = Selector(self._candidates, self._slow_start)
        self._unstreamed: list[tuple[float, int, Reservation]] = []  # by predicted end of prefill
        self._num_unstreamed = 0
        self._replicas_known_until_s = -math.inf  # until when other replicas' own word on their load counts
        self._kv_usage: dict[int, float] = {}
        known: ContentIndex = self._shadow if content is None else content(self._shadow)
        self._state = RoutingState(settings, self._candidates, self._load, self._costs, self._traffic, known)
        self._policy: Policy = make_policy(settings.policy, self._state, policies)
        self._has_events = self._policy.has_events

    def reconfigure(self, settings: RoutingSettings) -> None:
        """Decide by these settings from now on. Those of `FIXED_WHILE_RUNNING` must be the same as before."""
        assert all(getattr(settings, name) == getattr(self.settings, name) for name in FIXED_WHILE_RUNNING)
        self.settings = self._state.settings = self._learner.settings = settings
        self._candidates.reconfigure(settings)
        for slot in self._candidates.slot_of.values():
            self._set_capacity(slot)

    # -- the fleet -----------------------------------------------------------------------------

    def observe_view(self, view: FleetView, now_s: float) -> None:
        """Take over a new snapshot of the fleet. Forgets removed backends and lost caches."""
        change = self._candidates.update(view)
        self._load.expire_foreign(now_s)
        for slot in change.removed:
            self._shadow.remove(slot)
            self._policy.on_forget(slot, has_left=True)
            self._lives[slot] += 1
            self._kv_usage.pop(slot, None)
            self._load.open_slot(slot)
        for slot in change.joined:
            while len(self._lives) <= slot:
                self._lives.append(0)
            self._learner.open_slot(slot)
            self._load.open_slot(slot)
        for slot in change.emptied:
            self._shadow.forget(slot)
            self._policy.on_forget(slot, has_left=False)
        for slot in self._candidates.slot_of.values():
            self._set_capacity(slot)
        self._seed_load(change.admitted)

    def _seed_load(self, admitted: tuple[int, ...]) -> None:
        """Give backends that begin to take sessions a small recent past: no flood, no famine."""
        load = self._load
        settled = [
            slot
            for slot in self._candidates.slot_of.values()
            if slot not in admitted and self._is_open(self._candidates.backends[slot])
        ]
        if not settled:
            return
        mean = sum(load.recent[slot] for slot in settled) / len(settled)
        latest = max(load.turn[slot] for slot in settled)
        for slot in admitted:
            load.seed_recent(slot, max(load.recent[slot], mean * self.settings.slow_start_floor))
            load.turn[slot] = max(load.turn[slot], latest)

    @staticmethod
    def _is_open(backend: Backend | None) -> bool:
        return backend is not None and backend.state.takes_new_sessions

    def _set_capacity(self, slot: int) -> None:
        backend = self._candidates.backends[slot]
        assert backend is not None
        self._learner.set_capacity(slot, backend.kv_capacity_tokens)

    def observe_load(
        self, backend_id: BackendId, *, num_running: int, num_waiting: int, kv_usage: float, now_s: float
    ) -> None:
        """Take over an engine's own counts: what exceeds ours was put there by other replicas."""
        slot = self._candidates.slot_of.get(backend_id)
        if (
            slot is not None and now_s > self._replicas_known_until_s
        ):  # replicas that tell their load know it better
            self._load.observe_foreign(
                slot, num_running, num_waiting, self._traffic.mean_work * self._costs.fleet_scale, now_s
            )
            self._kv_usage[slot] = kv_usage
        self._load.expire_foreign(now_s)

    def loads(self) -> dict[BackendId, tuple[float, int]]:
        """Return per backend the prefill seconds outstanding and the requests in flight of this replica."""
        return {
            backend_id: (self._load.outstanding_s(slot), self._load.in_flight[slot])
            for backend_id, slot in self._candidates.slot_of.items()
        }

    def observe_others(self, loads: Mapping[BackendId, tuple[float, int]], now_s: float) -> None:
        """Take over what other replicas say that they have outstanding. Changes the load."""
        for backend_id, (work_s, num_requests) in loads.items():
            slot = self._candidates.slot_of.get(backend_id)
            if slot is not None:
                self._load.take_foreign(slot, work_s, num_requests, now_s)
        if loads:
            self._replicas_known_until_s = now_s + self.settings.load_stale_s
        self._load.expire_foreign(now_s)

    # -- one request ---------------------------------------------------------------------------

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
        """Choose a backend. Changes nothing. Raises NoBackend or ModelNotFound.

        `excluded` have failed this request. `avoided` get nothing new while another can take it, but keep
        their own sessions. `by_ring`: nothing is shared now, so only what every replica sees alike may
        decide: the ring.
        """
        usable = self._candidates.for_model(facts.model)
        home, cause, slots = self._selector.select(facts, binding, usable, excluded, avoided, by_ring)
        if not slots and home is None:
            raise NoBackend("no backend can take this request now", retry_after_s=self.settings.retry_after_s)
        ratio = self._tokens.get(facts.model)
        chain, prompt_tokens = measure_prompt(facts, binding, ratio)
        shares = self._candidates.shares(slots, usable, now_s) if slots else None
        request = PlacementRequest(facts, chain, prompt_tokens, ratio, home, slots, shares, now_s)
        request.is_moved = binding is not None and home is None
        if binding is not None and home is not None and now_s <= self._replicas_known_until_s:
            request.context_bytes = binding.context_tokens / ratio
        ranked = tuple(self._policy.rank(request))
        chosen = ranked[0]
        if excluded:
            affinity, reason = Affinity.FAILOVER, "failover"
        elif by_ring and home is None:
            affinity, reason = Affinity.UNPINNED, "ring_fallback"
        else:
            affinity, reason = name_choice(facts, binding, home, cause, chosen.backend_id)
        return Decision(
            backend_id=chosen.backend_id,
            affinity=affinity,
            reason=reason,
            ranked=ranked,
            key_source=facts.key_source,
            expected_cached_tokens=chosen.expected_cached_tokens,
            prompt_tokens=int(prompt_tokens),
            policy=self._policy.name,
        )

    def reserve(
        self, facts: RequestFacts, decision: Decision, now_s: float, *, backend_id: BackendId | None = None
    ) -> Reservation:
        """Count the request on its backend, before it is sent. Changes load, traffic and shadow."""
        if self._unstreamed and self._unstreamed[0][0] <= now_s:
            self._settle_unstreamed(now_s)
        target = decision.backend_id if backend_id is None else backend_id
        slot = self._candidates.slot_of[target]
        chain = facts.prefix or session_line(facts, facts.num_prompt_bytes)
        reservation = Reservation(facts, target, slot, self._lives[slot], chain)
        reservation.prompt_tokens = float(max(1, decision.prompt_tokens))
        for candidate in decision.ranked:
            if candidate.backend_id == target and candidate.prefill_s:
                reservation.expected_cached_tokens = candidate.expected_cached_tokens
                reservation.prefill_s = candidate.prefill_s
                break
        else:
            self._estimate(reservation)
        reservation.sent_s = now_s
        written, regretted = self._shadow.insert(slot, chain) if chain else (0, 0)
        self._traffic.add(now_s, reservation.prefill_s / self._costs.models[slot].scale, written, regretted)
        share = self._candidates.share(slot, facts.model, now_s)
        if not facts.is_stream:
            finish_s = now_s + self._load.wait[slot] + reservation.prefill_s
            self._num_unstreamed += 1
            heapq.heappush(self._unstreamed, (finish_s, self._num_unstreamed, reservation))
        self._load.send(slot, reservation.prefill_s, share, now_s)
        if self._has_events:
            self._policy.on_reserve(reservation)
        if decision.affinity is Affinity.NEW:
            self._note_new_session(slot, facts.model, now_s)
        elif decision.affinity in (Affinity.MOVED, Affinity.FAILOVER):
            self._load.adopted[slot] += 1
        return reservation

    def _estimate(self, reservation: Reservation) -> None:
        """Predict the prefill on a backend that the policy has not priced. Changes the reservation."""
        slot, prompt_tokens = reservation.slot, reservation.prompt_tokens
        ratio = self._tokens.get(reservation.facts.model)
        cached = min(self._state.content.cached_bytes(slot, reservation.chain) * ratio, prompt_tokens - 1.0)
        reservation.expected_cached_tokens = int(cached)
        reservation.prefill_s = self._costs.models[slot].seconds(prompt_tokens - cached, cached)

    def _note_new_session(self, slot: int, model: str | None, now_s: float) -> None:
        warming, total_share = self._candidates.warming(self._candidates.for_model(model), now_s)
        self._slow_start.note_new_session(slot, warming, total_share)

    def _settle_unstreamed(self, now_s: float) -> None:
        """Take prefills that must be over by now as done. Changes the load.

        An answer without streaming shows nothing until its last token: without this, its prefill would look
        like a queue for as long as the engine generates. O(log requests) each.
        """
        unstreamed = self._unstreamed
        while unstreamed and unstreamed[0][0] <= now_s:
            reservation = heapq.heappop(unstreamed)[2]
            if not reservation.is_released:
                self._end_prefill(reservation, now_s)
                reservation.service_s = None  # predicted, not observed: nothing to learn from

    def first_token(self, reservation: Reservation, now_s: float) -> None:
        """The answer began: its prefill is done. Changes the load. Later calls change nothing."""
        self._end_prefill(reservation, now_s)

    def _end_prefill(self, reservation: Reservation, now_s: float) -> None:
        if reservation.is_answered or reservation.is_released:
            return
        reservation.is_answered = True
        if self._is_current(reservation):
            reservation.service_s = self._load.service_s(reservation.slot, reservation.sent_s, now_s)
            self._load.prefilled(reservation.slot, reservation.prefill_s)
            if self._has_events:
                self._policy.on_first_token(reservation)

    def release(self, reservation: Reservation, now_s: float, usage: Usage | None, completed: bool) -> None:
        """The request is over, however it ended. Exactly once. Changes load, shadow and calibration.

        A request that never began to answer counts as answered now, so that its work does not linger.
        """
        assert not reservation.is_released, "a reservation is released exactly once"
        if self._unstreamed and self._unstreamed[0][0] <= now_s:
            self._settle_unstreamed(now_s)
        was_answered = reservation.is_answered
        if not was_answered:
            self._end_prefill(reservation, now_s)
        reservation.is_released = True
        if not self._is_current(reservation):
            return  # its backend has left the fleet, and the counts with it
        self._load.done(reservation.slot)
        if self._has_events:
            self._policy.on_release(reservation)
        if not was_answered:
            reservation.service_s = None  # a whole answer's time says nothing of its prefill
        if completed and usage is not None:
            self._learner.learn(reservation, usage)

    def _is_current(self, reservation: Reservation) -> bool:
        return self._lives[reservation.slot] == reservation.life

    # -- looking in ----------------------------------------------------------------------------

    def in_flight(self, backend_id: BackendId) -> int:
        slot = self._candidates.slot_of.get(backend_id)
        return 0 if slot is None else self._load.in_flight[slot]

    def ring_owners(self, key: str, count: int) -> list[BackendId]:
        """Return the first backends of the ring for a key, whatever their health."""
        return list(islice(self._candidates.ring.walk(key), count))

    @property
    def ring(self) -> Ring:
        """The ring of the present fleet; immutable, so it may be kept and compared."""
        return self._candidates.ring

    def holders(self, chain: Chain) -> dict[BackendId, int]:
        """Return who is believed to hold some of this prefix, and how many tokens. Changes nothing."""
        ratio = self._tokens.mean
        return {
            self._candidates.backend_id(slot): int(num_bytes * ratio)
            for slots, num_bytes in self._state.content.levels(chain)
            for slot in slots
            if self._candidates.backends[slot] is not None
        }

    def snapshot(self) -> dict[BackendId, Mapping[str, object]]:
        """Return what is known and believed of each backend, for the admin API. Changes nothing."""
        return {
            backend_id: {
                "in_flight": self._load.in_flight[slot],
                "outstanding_work_s": self._load.outstanding_s(slot),
                "wait_s": self._load.wait[slot],
                "shadow_lines": self._shadow.num_lines(slot),
                "shadow_tokens": int(self._shadow.used_bytes(slot) * self._tokens.mean),
                "kv_usage": self._kv_usage.get(slot),
                "shadow_trust": self._learner.trust[slot],
                "prefill_tokens_per_s": 1.0 / self._costs.models[slot].s_per_token,
            }
            for backend_id, slot in sorted(self._candidates.slot_of.items())
        }
