"""Chooses the backend that serves a request. `decide` only reads; all other calls change the state.

Callers call `observe_view` whenever the fleet has changed. For each request they call `decide`, then
`reserve` with no await between, `first_token` when the answer begins, and `release` exactly once. The same
calls in the same order give the same decisions, bit for bit: there is no clock, no randomness and no I/O in
here.

A caller with many requests may enter them in batches: `note_sent` instead of `reserve`, `note_ended` instead
of `release`, and later `take` with all that was noted, in order. Noting counts the load, which the next
decision needs; `take` does the rest (`bookkeeping.py`). Such a caller sets `drain` to a function that takes
its batch. The router calls it before each full decision, each view, each request that is entered at once, and
each page. Only two things see a state that is one batch old: price and expected cache of a session that stays
at home, and the mean work that a scraped load is multiplied by. Our own work is always counted exactly.

Invariants: a decision names a routable backend that serves the model and is not excluded. In-flight counts
and outstanding work are never negative, and are zero once every reservation has been released.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from gateway.errors import NoBackend
from gateway.routing.bookkeeping import Bookkeeping
from gateway.routing.calibration import CostModel, TokenRatio
from gateway.routing.candidates import Candidates
from gateway.routing.learning import Learner
from gateway.routing.load import LoadTable
from gateway.routing.news import Exchange, News
from gateway.routing.placement_request import PlacementRequest, Policy, RoutingState, measure_prompt, room_for
from gateway.routing.policy_registry import POLICIES, PolicyFactory, make_policy
from gateway.routing.reservation import Reservation
from gateway.routing.ring import Ring
from gateway.routing.selection import Selector, name_choice
from gateway.routing.settings import FIXED_WHILE_RUNNING, RoutingSettings
from gateway.routing.shadow import Chain, ContentIndex, Shadow
from gateway.routing.slow_start import SlowStart
from gateway.routing.stays import HomeTest
from gateway.routing.traffic import Traffic
from gateway.values import Affinity, BackendId, Binding, Decision, FleetView, RequestFacts, Usage


def _drain_nothing() -> None:
    """Where no caller enters requests in batches."""


class Router:
    """All placement state of one gateway process."""

    def __init__(
        self,
        settings: RoutingSettings,
        *,
        policies: Mapping[str, PolicyFactory] = POLICIES,
        content: Callable[[Shadow], ContentIndex] | None = None,
    ) -> None:
        """Raises ValueError if `policies` lacks the one that the settings name.

        `content` wraps the router's shadow in another index of cached prefixes, which policies then see.
        """
        self.settings = settings
        self._candidates = Candidates(settings)
        self._load = LoadTable(settings)
        self._costs = CostModel(settings)
        self._traffic = Traffic(settings)
        self._tokens = TokenRatio(settings.tokens_per_byte)
        self._shadow = Shadow(settings.shadow_entries_per_backend)
        self._learner = Learner(settings, self._shadow, self._costs, self._tokens)
        self._lives: list[int] = []  # by slot: how many backends have had it before
        slow_start = SlowStart()
        self._selector = Selector(self._candidates, slow_start)
        self.could_take, self.knows_model = self._selector.could_take, self._candidates.knows
        self.drain: Callable[[], object] = _drain_nothing
        self._unstreamed: list[tuple[float, int, Reservation]] = []  # by predicted end of prefill
        self._num_unstreamed = 0
        self._replicas_known_until_s = -math.inf  # until then replicas' own reports count
        self._kv_usage: dict[int, float] = {}
        known: ContentIndex = self._shadow if content is None else content(self._shadow)
        self._state = RoutingState(settings, self._candidates, self._load, self._costs, self._traffic, known)
        self.news = Exchange(self._state, self._shadow)
        self._books = Bookkeeping(self._state, self._learner, self._shadow, slow_start, self.news)
        self._policy: Policy = make_policy(settings.policy, self._state, policies)
        self._has_events = self._policy.has_events
        self._home_test = (
            HomeTest(self._state, self._tokens, self._policy.name) if self._policy.tests_home else None
        )

    def __repr__(self) -> str:
        in_flight = sum(num_requests for _, num_requests in self.loads().values())
        return f"<Router {self._policy.name}: {in_flight} in flight, {self._candidates!r}>"

    def reconfigure(self, settings: RoutingSettings) -> None:
        """Decide by these settings from now on. Options in `FIXED_WHILE_RUNNING` must not have changed."""
        assert all(getattr(settings, name) == getattr(self.settings, name) for name in FIXED_WHILE_RUNNING)
        self.drain()
        self.settings = self._state.settings = self._learner.settings = settings
        self._candidates.reconfigure(settings)
        for slot in self._candidates.slot_of.values():
            self._set_capacity(slot)

    # -- the fleet -----------------------------------------------------------------------------

    def observe_view(self, view: FleetView, now_s: float) -> None:
        """Take over a new snapshot of the fleet. Forgets removed backends and lost caches."""
        self.drain()
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
        self._load.seed(change.admitted, self._candidates.open_slots(), self.settings.slow_start_floor)

    def _set_capacity(self, slot: int) -> None:
        backend = self._candidates.backends[slot]
        assert backend is not None
        self._learner.set_capacity(slot, backend.kv_capacity_tokens)

    def observe_load(
        self, backend_id: BackendId, *, num_running: int, num_waiting: int, kv_usage: float, now_s: float
    ) -> None:
        """Take over an engine's own counts: what exceeds ours was put there by other replicas.

        Counts are ignored while replicas report their load themselves, which is more exact.
        """
        slot = self._candidates.slot_of.get(backend_id)
        if slot is not None:
            self._kv_usage[slot] = kv_usage
            self._load.observe_kv(slot, kv_usage, now_s)
        if slot is not None and now_s > self._replicas_known_until_s:
            mean_prefill_s = self._traffic.mean_work * self._costs.fleet_scale
            self._load.observe_foreign(slot, num_running, num_waiting, mean_prefill_s, now_s)
        self._load.expire_foreign(now_s)

    def observe_news(self, news: News, now_s: float) -> None:
        """Take over what another replica has sent: the same backends hold it. Changes all but the load."""
        self.drain()
        self.news.enter(news, now_s)

    def loads(self) -> dict[BackendId, tuple[float, int]]:
        """Return this replica's outstanding prefill seconds and requests in flight, per backend."""
        return {
            backend_id: (self._load.outstanding_s(slot), self._load.in_flight[slot])
            for backend_id, slot in self._candidates.slot_of.items()
        }

    def observe_others(self, loads: Mapping[BackendId, tuple[float, int]], now_s: float) -> None:
        """Take over what other replicas report as outstanding there. Changes the load."""
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

        `excluded`: backends that have failed this request. `avoided`: backends that get no new session while
        another can take it; they keep those they have. `by_ring`: no session store is shared now, so the ring
        places sessions without a home, because every replica has the same ring.
        """
        if binding is not None and not excluded and self._home_test is not None:
            others_report = now_s <= self._replicas_known_until_s
            stay = self._home_test.decide(facts, binding, now_s, avoided, others_report)
            if stay is not None:
                return stay
        self.drain()
        return self.decide_fully(facts, binding, now_s, excluded, avoided, by_ring)

    def decide_fully(
        self,
        facts: RequestFacts,
        binding: Binding | None,
        now_s: float,
        excluded: frozenset[BackendId],
        avoided: frozenset[BackendId],
        by_ring: bool,
    ) -> Decision:
        """Choose among all backends. `decide` gives the same decision, sooner for a session that stays."""
        usable = self._candidates.for_model(facts.model)
        ratio = self._tokens.get(facts.model)
        chain, prompt_tokens = measure_prompt(facts, binding, ratio)
        num_tokens = room_for(facts, prompt_tokens)
        home, cause, slots = self._selector.select(
            facts, binding, usable, excluded, avoided, by_ring, num_tokens
        )
        if not slots and home is None:
            raise NoBackend("no backend can take this request now", retry_after_s=self.settings.retry_after_s)
        if home is None and usable.tiers[1] and not excluded:
            slots = self._selector.on_trial(usable, avoided, self._load.in_flight) or slots
        shares = self._candidates.shares(slots, usable, now_s) if slots else None
        request = PlacementRequest(facts, chain, prompt_tokens, ratio, home, slots, shares, now_s)
        request.is_moved = binding is not None and home is None
        request.is_weighted = usable.weights is not None
        if binding is not None and home is not None:
            request.context_tokens = binding.context_tokens
            request.trusts_context = now_s <= self._replicas_known_until_s
        ranked = tuple(self._policy.rank(request))
        chosen = ranked[0]
        if excluded:
            affinity, reason = Affinity.FAILOVER, "failover"
        elif by_ring and home is None:
            affinity, reason = Affinity.UNPINNED, "ring_fallback"
        else:
            affinity, reason = name_choice(request, binding, cause, chosen.backend_id)
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
        """Count the request on its backend before it is sent. Changes load, traffic and shadow.

        `backend_id` overrides the decision's choice.
        """
        self.drain()
        reservation = self.note_sent(facts, decision, now_s, backend_id=backend_id)
        self.take((reservation,))
        return reservation

    def note_sent(
        self, facts: RequestFacts, decision: Decision, now_s: float, *, backend_id: BackendId | None = None
    ) -> Reservation:
        """Count the request on its backend; `take` does the rest of `reserve`. Changes the load."""
        if self._unstreamed and self._unstreamed[0][0] <= now_s:
            self._settle_unstreamed(now_s)
        target = decision.backend_id if backend_id is None else backend_id
        slot = self._candidates.slot_of[target]
        reservation = Reservation(facts, decision, target, slot, self._lives[slot], now_s)
        for candidate in decision.ranked:
            if candidate.backend_id == target and candidate.prefill_s:
                reservation.expected_cached_tokens = candidate.expected_cached_tokens
                reservation.prefill_s = candidate.prefill_s
                break
        else:
            self.drain()
            self._estimate(reservation)
        if not facts.is_stream:
            finish_s = now_s + self._load.wait[slot] + reservation.prefill_s
            self._num_unstreamed += 1
            heapq.heappush(self._unstreamed, (finish_s, self._num_unstreamed, reservation))
        self._load.count_sent(slot, reservation.prefill_s)
        if self._has_events:
            self._policy.on_reserve(reservation)
        return reservation

    def _estimate(self, reservation: Reservation) -> None:
        """Predict the prefill on a backend that the policy has not priced. Changes the reservation."""
        slot, prompt_tokens = reservation.slot, reservation.prompt_tokens
        ratio = self._tokens.get(reservation.facts.model)
        cached = min(self._state.content.cached_bytes(slot, reservation.chain) * ratio, prompt_tokens - 1.0)
        reservation.expected_cached_tokens = self._candidates.in_blocks(slot, cached)
        reservation.prefill_s = self._costs.models[slot].seconds(prompt_tokens - cached, cached)

    def take(self, batch: Sequence[Reservation]) -> None:
        """Finish what was noted, in this order: a reservation stands once as sent, once as ended.

        Equals `reserve` and `release` one by one. Changes all but the load.
        """
        self._books.take(batch, self._lives)

    def _settle_unstreamed(self, now_s: float) -> None:
        """Count prefills as done that must be over by now. Changes the load. O(log requests) each.

        An answer that is not streamed shows nothing before it is complete. Its prefill would look like a
        queue for as long as the engine generates.
        """
        unstreamed = self._unstreamed
        while unstreamed and unstreamed[0][0] <= now_s:
            reservation = heapq.heappop(unstreamed)[2]
            if not reservation.is_released:
                self._end_prefill(reservation, now_s)
                reservation.service_s = None  # predicted, not observed: nothing to learn

    def first_token(self, reservation: Reservation, now_s: float) -> None:
        """Count the prefill as done: the answer has begun. Changes the load. Later calls change nothing."""
        self._end_prefill(reservation, now_s)

    def _end_prefill(self, reservation: Reservation, now_s: float) -> None:
        if reservation.is_answered or reservation.is_released:
            return
        reservation.is_answered = True
        slot = reservation.slot
        if self._lives[slot] == reservation.life:
            reservation.service_s = self._load.count_answered(
                slot, reservation.prefill_s, reservation.sent_s, now_s
            )
            if self._has_events:
                self._policy.on_first_token(reservation)

    def release(self, reservation: Reservation, now_s: float, usage: Usage | None, completed: bool) -> None:
        """End the reservation, however the request ended. Once only. Changes load, shadow and calibration.

        If no token was seen, the prefill counts as done now.
        """
        self.drain()
        self.note_ended(reservation, now_s, usage, completed)
        self.take((reservation,))

    def note_ended(
        self, reservation: Reservation, now_s: float, usage: Usage | None, completed: bool
    ) -> None:
        """Count the request as ended; `take` does the rest of `release`. Changes the load."""
        assert not reservation.is_released, "a reservation is released exactly once"
        if self._unstreamed and self._unstreamed[0][0] <= now_s:
            self._settle_unstreamed(now_s)
        was_answered = reservation.is_answered
        if not was_answered:
            self._end_prefill(reservation, now_s)
        reservation.is_released = True
        if self._lives[reservation.slot] != reservation.life:
            return  # its backend has left the fleet, and its counts with it
        self._load.done(reservation.slot)
        if self._has_events:
            self._policy.on_release(reservation)
        if not was_answered:
            reservation.service_s = None  # the time of a whole answer says nothing about its prefill
        if completed:
            reservation.usage = usage

    # -- queries -------------------------------------------------------------------------------

    def in_flight(self, backend_id: BackendId) -> int:
        slot = self._candidates.slot_of.get(backend_id)
        return 0 if slot is None else self._load.in_flight[slot]

    def ring_owners(self, key: str, count: int) -> list[BackendId]:
        """Return the first backends on the ring for a key, whatever their health."""
        return list(islice(self._candidates.ring.walk(key), count))

    @property
    def ring(self) -> Ring:
        """The ring of the current fleet; immutable, so it may be kept and compared."""
        return self._candidates.ring

    def holders(self, chain: Chain) -> dict[BackendId, int]:
        """Return the backends believed to hold some of this prefix, with the number of tokens."""
        self.drain()
        ratio = self._tokens.mean
        return {
            self._candidates.backend_id(slot): int(num_bytes * ratio)
            for slots, num_bytes in self._state.content.levels(chain)
            for slot in slots
            if self._candidates.backends[slot] is not None
        }

    def snapshot(self) -> dict[BackendId, Mapping[str, object]]:
        """Return what is known and estimated of each backend, for the admin API."""
        self.drain()
        return {
            backend_id: {
                "in_flight": self._load.in_flight[slot],
                "outstanding_work_s": self._load.outstanding_s(slot),
                "wait_s": self._load.wait[slot],
                "shadow_lines": self._shadow.num_lines(slot),
                "shadow_tokens": int(self._shadow.used_bytes(slot) * self._tokens.mean),
                "kv_usage": self._kv_usage.get(slot),
                "shadow_trust": self._learner.trust[slot],
                "found_empty": self._learner.num_emptied[slot],
                "prefill_tokens_per_s": 1.0 / self._costs.models[slot].s_per_token,
            }
            for backend_id, slot in sorted(self._candidates.slot_of.items())
        }
