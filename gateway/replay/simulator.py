"""Discrete-event simulation of a fleet behind the real Router; deterministic for its inputs.

The simulator plays the part of the proxy (decide, reserve, first token, release with usage) and of the
session store: one binding per session, claimed at the first turn and moved as decided. It can play several
gateway replicas; `SimulationPlan.replicas` states what they share.

Invariants: every request is answered once, or counted as broken if its engine died in the middle of the
stream. After the run no router holds a reservation. The simulator knows nothing about how a policy works.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec

from gateway.errors import NoBackend
from gateway.replay.engines import Engine, EngineSpeed
from gateway.replay.facts import facts_of
from gateway.replay.reported_content import CompletedContent
from gateway.replay.rivals.registry import ALL_POLICIES
from gateway.replay.trace import BYTES_PER_TOKEN, Trace, TraceTurn
from gateway.routing.reservation import Reservation
from gateway.routing.router import Router
from gateway.routing.settings import RoutingSettings
from gateway.routing.shadow import Shadow
from gateway.values import (
    Affinity,
    Backend,
    BackendId,
    BackendState,
    Binding,
    Decision,
    FleetView,
    RequestFacts,
    SessionKey,
    Usage,
)

EventKind = Literal["down", "drain", "restart", "up", "add"]
_ARRIVE, _PREFILLED, _DONE, _FLEET, _EXCHANGE = range(5)
_RAMP_SPEEDUP = 20.0
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvent:
    """A change of the fleet.

    `down`: the engine dies with all it runs. `drain`: it takes nothing new. `restart`: the process of a
    drained engine ends. `up`: it is back with an empty cache. `add`: a new engine joins.
    """

    at_s: float
    kind: EventKind
    engine: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How many gateways there are, and what they share."""

    count: int = 1
    dispatch: Literal["round_robin", "by_session"] = "round_robin"
    shares_bindings: bool = True  # one session store for all
    exchange_s: float | None = None  # seconds between exchanges of load; None: never


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    """All that a run depends on, besides the trace."""

    num_engines: int = 8
    speed: EngineSpeed = field(default_factory=EngineSpeed)
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    knowledge: Literal["gateway", "exact"] = "gateway"  # exact: engines report their cache content
    warm_up_s: float = 0.0  # requests that arrive earlier are played but not measured
    ramp_s: float = 0.0  # until then prefill is 20 × faster, so that caches fill
    horizon_s: float = math.inf  # no arrivals after this
    events: Sequence[FleetEvent] = ()
    replicas: Replicas = Replicas()
    uses_sessions: bool = True  # False: clients send no session id
    weights: Sequence[float] = ()  # of the engines, in order; 1 for those not named


@dataclass(slots=True)
class SimulatedOutcome:
    """What became of one request."""

    arrived_s: float = math.nan
    ttft_s: float = math.nan
    end_to_end_s: float = math.nan
    cached_tokens: int = 0
    work_s: float = 0.0
    engine: int = -1
    affinity: Affinity | None = None
    reason: str = ""


@dataclass(slots=True)
class _Pending:
    router: Router
    reservation: Reservation
    prefill_done: bool = False


@dataclass(slots=True)
class SimulationResult:
    """Outcomes in the order of the trace, and counts of failures."""

    trace: Trace
    plan: SimulationPlan
    outcomes: list[SimulatedOutcome]
    num_engines: int
    broken: int = 0
    retried: int = 0
    decisions: list[Decision] = field(default_factory=list)


class Simulation:
    """One run. Use `simulate`."""

    def __init__(self, trace: Trace, plan: SimulationPlan, facts: list[RequestFacts] | None = None) -> None:
        self.trace = trace
        self.plan = plan
        self._turns: list[TraceTurn] = trace.turns
        self._facts = facts or facts_of(trace, uses_sessions=plan.uses_sessions)
        self._engines = [Engine(f"engine-{index:03d}", index) for index in range(plan.num_engines)]
        self._cache_bytes = plan.speed.cache_tokens * BYTES_PER_TOKEN
        self._caches = Shadow(10**9)
        for engine in self._engines:
            self._caches.set_capacity(engine.slot, self._cache_bytes)
        content = partial(CompletedContent, self._caches) if plan.knowledge == "exact" else None
        self._routers = [
            Router(plan.routing, policies=ALL_POLICIES, content=content) for _ in range(plan.replicas.count)
        ]
        tables = 1 if plan.replicas.shares_bindings else plan.replicas.count
        self._bindings: list[dict[SessionKey, Binding]] = [{} for _ in range(tables)]
        self._pending: dict[int, _Pending] = {}
        self._attempts = [0] * len(self._turns)
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._sequence = 0
        self._generation = 0
        self._num_routed = 0
        self._now_s = 0.0
        self.result = SimulationResult(
            trace, plan, [SimulatedOutcome() for _ in self._turns], plan.num_engines
        )

    # -- the run -------------------------------------------------------------------------------

    def run(self) -> SimulationResult:
        for index, turn in enumerate(self._turns):
            if turn.follows < 0:
                self._push(turn.at_s, _ARRIVE, index)
        for number, event in enumerate(self.plan.events):
            self._push(event.at_s, _FLEET, number)
        if self.plan.replicas.exchange_s is not None:
            self._push(self.plan.replicas.exchange_s, _EXCHANGE, 0)
            for router in self._routers:
                router.news.is_collecting = True
        self._publish()
        while self._heap:
            self._now_s, _, kind, index, attempt = heapq.heappop(self._heap)
            if kind == _ARRIVE:
                if self._now_s <= self.plan.horizon_s:
                    self._arrive(index)
            elif kind == _FLEET:
                self._change_fleet(self.plan.events[index])
            elif kind == _EXCHANGE:
                self._exchange_loads()
            elif self._attempts[index] == attempt:  # else its engine has died since
                if kind == _PREFILLED:
                    self._prefilled(index)
                else:
                    self._done(index)
        return self.result

    def _push(self, at_s: float, kind: int, index: int, attempt: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at_s, self._sequence, kind, index, attempt))

    def _arrive(self, index: int) -> None:
        outcome, facts = self.result.outcomes[index], self._facts[index]
        if math.isnan(outcome.arrived_s):
            outcome.arrived_s = self._now_s
        number = self._replica(index)
        router = self._routers[number]
        bindings = self._bindings[number % len(self._bindings)]
        binding = bindings.get(facts.session_key) if facts.session_key else None
        try:
            # the proxy places by the ring while there is no common store
            by_ring = self.plan.replicas.count > 1 and not self.plan.replicas.shares_bindings
            decision = router.decide(facts, binding, self._now_s, by_ring=by_ring)
        except NoBackend:
            self._push(self._now_s + _RETRY_S, _ARRIVE, index)
            return
        reservation = router.reserve(facts, decision, self._now_s)
        engine = self._engines[int(decision.backend_id.rsplit("-", 1)[1])]
        if facts.session_key is not None:
            bindings[facts.session_key] = self._bind(binding, decision, engine)
        outcome.engine, outcome.affinity, outcome.reason = engine.slot, decision.affinity, decision.reason
        self._pending[index] = _Pending(router, reservation)
        engine.queue.append(index)
        engine.live.add(index)
        self._start(engine)

    def _replica(self, index: int) -> int:
        count = self.plan.replicas.count
        if count == 1:
            return 0
        if self.plan.replicas.dispatch == "by_session":
            return self._turns[index].session % count
        self._num_routed += 1
        return self._num_routed % count

    def _bind(self, before: Binding | None, decision: Decision, engine: Engine) -> Binding:
        stays = (
            before is not None and before.backend_id == decision.backend_id and before.epoch == engine.life
        )
        version = 1 if before is None else before.version + (not stays)
        return Binding(
            backend_id=decision.backend_id,
            epoch=engine.life,
            version=version,
            context_tokens=0 if before is None else before.context_tokens,
            num_turns=1 if before is None else before.num_turns + 1,
        )

    # -- engines -------------------------------------------------------------------------------

    def _start(self, engine: Engine) -> None:
        speed = self.plan.speed
        while engine.prefilling < 0 and engine.queue:
            index = engine.queue[0]
            turn = self._turns[index]
            need = turn.prompt_tokens + turn.answer_tokens
            is_full = engine.running and engine.kv_tokens + need > speed.cache_tokens
            if engine.running >= speed.max_running or is_full:
                return
            engine.queue.popleft()
            held = self._caches.cached_bytes(engine.slot, turn.chain) // BYTES_PER_TOKEN
            cached = min(held // self.trace.block_tokens * self.trace.block_tokens, turn.prompt_tokens - 1)
            work_s = speed.prefill_s(turn.prompt_tokens - cached, cached)
            if self._now_s < self.plan.ramp_s:
                work_s /= _RAMP_SPEEDUP
            outcome = self.result.outcomes[index]
            outcome.cached_tokens, outcome.work_s = cached, work_s
            if turn.chain:
                self._caches.insert(engine.slot, turn.chain)
            engine.running += 1
            engine.kv_tokens += need
            engine.prefilling = index
            self._push(self._now_s + work_s, _PREFILLED, index, self._attempts[index])

    def _prefilled(self, index: int) -> None:
        outcome, turn = self.result.outcomes[index], self._turns[index]
        engine = self._engines[outcome.engine]
        engine.prefilling = -1
        outcome.ttft_s = self._now_s - outcome.arrived_s
        pending = self._pending[index]
        pending.prefill_done = True
        pending.router.first_token(pending.reservation, self._now_s)
        decode_s = self.plan.speed.decode_of(turn.answer_tokens, engine.running)
        self._push(self._now_s + decode_s, _DONE, index, self._attempts[index])
        self._start(engine)

    def _done(self, index: int) -> None:
        outcome, turn = self.result.outcomes[index], self._turns[index]
        engine = self._engines[outcome.engine]
        engine.running -= 1
        engine.kv_tokens -= turn.prompt_tokens + turn.answer_tokens
        engine.live.discard(index)
        outcome.end_to_end_s = self._now_s - outcome.arrived_s
        if turn.chain and turn.answer_cached_tokens:
            self._caches.add_answer(engine.slot, turn.chain, turn.answer_cached_tokens * BYTES_PER_TOKEN)
        pending = self._pending.pop(index)
        usage = Usage(
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.answer_tokens,
            # while prefill is 20 × faster, routers must not learn the speed of engines
            cached_tokens=None if outcome.arrived_s < self.plan.ramp_s else outcome.cached_tokens,
        )
        pending.router.release(pending.reservation, self._now_s, usage, completed=True)
        self._renew(index, turn.prompt_tokens + turn.answer_tokens)
        self._send_next(turn)
        self._start(engine)

    def _renew(self, index: int, context_tokens: int) -> None:
        """Store the context's size in the session's binding, if that engine is still its home."""
        key, outcome = self._facts[index].session_key, self.result.outcomes[index]
        for bindings in self._bindings:
            binding = bindings.get(key) if key is not None else None
            if key is not None and binding and binding.backend_id == self._engines[outcome.engine].name:
                bindings[key] = msgspec.structs.replace(binding, context_tokens=context_tokens)

    def _send_next(self, turn: TraceTurn) -> None:
        if turn.followed_by < 0:
            return
        following = self._turns[turn.followed_by]
        if self.trace.is_closed:
            self._push(self._now_s + (following.think_s or 0.0), _ARRIVE, turn.followed_by)
        else:
            self._push(max(self._now_s + 0.001, following.at_s), _ARRIVE, turn.followed_by)

    # -- the fleet -----------------------------------------------------------------------------

    def _change_fleet(self, event: FleetEvent) -> None:
        if event.kind == "add":
            engine = Engine(f"engine-{len(self._engines):03d}", len(self._engines), since_s=self._now_s)
            self._engines.append(engine)
            self._caches.set_capacity(engine.slot, self._cache_bytes)
            self.result.num_engines += 1
            self._publish()
            return
        engine = self._engines[event.engine]
        lost: list[int] = []
        if event.kind in ("down", "restart"):
            lost = engine.die()
            self._caches.forget(engine.slot)
        elif event.kind == "drain":
            engine.is_draining = True
        else:
            engine.is_alive, engine.is_draining = True, False
        engine.since_s = self._now_s
        self._publish()
        for index in lost:
            self._lose(index)

    def _lose(self, index: int) -> None:
        """End a request whose engine died: retry it if nothing was sent yet, else count it as broken."""
        pending = self._pending.pop(index)
        self._attempts[index] += 1
        pending.router.release(pending.reservation, self._now_s, None, completed=False)
        if pending.prefill_done:
            self.result.broken += 1
            self._send_next(self._turns[index])
        else:
            self.result.retried += 1
            self._push(self._now_s, _ARRIVE, index)

    def _publish(self) -> None:
        """Give every router a new view of the fleet."""
        self._generation += 1
        weights = self.plan.weights
        backends: dict[BackendId, Backend] = {}
        for engine in self._engines:
            state = BackendState.READY
            if not engine.is_alive:
                state = BackendState.DOWN
            elif engine.is_draining:
                state = BackendState.DRAINING
            backends[BackendId(engine.name)] = Backend(
                backend_id=BackendId(engine.name),
                base_url=f"http://{engine.name}:8000",
                state=state,
                epoch=engine.life,
                weight=weights[engine.slot] if engine.slot < len(weights) else 1.0,
                since_s=engine.since_s,
                kv_capacity_tokens=self.plan.speed.cache_tokens,
            )
        view = FleetView(generation=self._generation, backends=backends)
        for router in self._routers:
            router.observe_view(view, self._now_s)

    def _exchange_loads(self) -> None:
        """Tell every replica of the others; schedule the next exchange while there is work."""
        reports = [router.loads() for router in self._routers]
        told = [router.news.take() for router in self._routers]
        for number, router in enumerate(self._routers):
            others: dict[BackendId, tuple[float, int]] = {}
            for loads in (*reports[:number], *reports[number + 1 :]):
                for backend_id, (work_s, num_requests) in loads.items():
                    before = others.get(backend_id, (0.0, 0))
                    others[backend_id] = (before[0] + work_s, before[1] + num_requests)
            router.observe_others(others, self._now_s)
            for news in (*told[:number], *told[number + 1 :]):
                router.observe_news(news, self._now_s)
        if self._heap and self.plan.replicas.exchange_s is not None:
            self._push(self._now_s + self.plan.replicas.exchange_s, _EXCHANGE, 0)


def simulate(trace: Trace, plan: SimulationPlan, facts: list[RequestFacts] | None = None) -> SimulationResult:
    """Play the trace through the plan's fleet and return the outcome of every request."""
    return Simulation(trace, plan, facts).run()
