"""Placement under any sequence of events: a stateful property test of the router.

Sessions come and go, backends join, drain, die, restart and leave, requests are in flight meanwhile; every
policy is driven. A model beside the router keeps what must be true.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from routing.routing_worlds import backend, bind, fleet, names, ready_router, request

from gateway.errors import GatewayError, NoBackend
from gateway.replay.rivals.registry import ALL_POLICIES
from gateway.routing.reservation import Reservation
from gateway.routing.router import Router
from gateway.routing.selection import MOST_ON_TRIAL
from gateway.routing.settings import POLICY_NAMES, RoutingSettings
from gateway.values import Affinity, Backend, BackendId, BackendState, Binding, Usage

NAMES = names(5)
STATES = st.sampled_from(
    [BackendState.READY] * 4
    + [BackendState.DEGRADED, BackendState.DRAINING, BackendState.CORDONED, BackendState.DOWN]
)


class PlacementMachine(RuleBasedStateMachine):
    """The router between a changing fleet and unfinished requests."""

    @initialize(policy=st.sampled_from(POLICY_NAMES))
    def start(self, policy: str) -> None:
        self.now_s = 1000.0
        self.router = Router(RoutingSettings(policy=policy, kv_capacity_tokens=2000), policies=ALL_POLICIES)
        self.rows: dict[str, Backend] = {name: backend(name, since_s=self.now_s) for name in NAMES}
        self.bindings: dict[str, Binding] = {}
        self.turns: Counter[str] = Counter()
        self.held: list[Reservation] = []
        self.generation = 0
        self.publish()

    def publish(self) -> None:
        self.generation += 1
        self.router.observe_view(fleet(*self.rows.values(), generation=self.generation), self.now_s)
        self.held = [reservation for reservation in self.held if reservation.backend_id in self.rows]

    @rule(seconds=st.floats(0.0, 500.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(name=st.sampled_from(NAMES), state=STATES, restarts=st.booleans())
    def change(self, name: str, state: BackendState, restarts: bool) -> None:
        row = self.rows.get(name) or backend(name, epoch=7)
        self.rows[name] = replace(row, state=state, epoch=row.epoch + restarts, since_s=self.now_s)
        self.publish()

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        self.rows.pop(name, None)
        self.publish()

    @rule(session=st.sampled_from(["x", "y", "z", None]), prompt=st.sampled_from([None, "p", "q"]))
    def ask(self, session: str | None, prompt: str | None) -> None:
        label = session or "keyless"
        turn = self.turns[label] + 1
        texts = tuple(f"{label} {number}" for number in range(2 * turn - 1))
        facts = request(session, prompt=prompt, texts=texts)
        binding = self.bindings.get(label) if session else None
        try:
            decision = self.router.decide(facts, binding, self.now_s)
        except NoBackend:
            open_states = (BackendState.READY, BackendState.DEGRADED)
            if binding is None:
                assert not any(row.state in open_states for row in self.rows.values())
            else:
                assert not any(row.state.is_routable for row in self.rows.values())
            return
        assert decision == self.router.decide(facts, binding, self.now_s), "deciding changes nothing"
        chosen = self.rows[decision.backend_id]
        assert chosen.state.is_routable
        assert decision.ranked[0].backend_id == decision.backend_id
        if decision.affinity is Affinity.HIT:
            assert binding is not None
            assert (binding.backend_id, binding.epoch) == (chosen.backend_id, chosen.epoch)
            assert chosen.state.keeps_sessions
        elif any(row.state is BackendState.READY for row in self.rows.values()):
            on_trial = chosen.state is BackendState.DEGRADED
            assert on_trial or chosen.state is BackendState.READY
            assert not on_trial or self.router.in_flight(chosen.backend_id) < MOST_ON_TRIAL
        if session:
            self.bindings[label] = bind(decision, epoch=chosen.epoch)
        self.turns[label] = turn
        self.held.append(self.router.reserve(facts, decision, self.now_s))

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100))
    def answer(self, index: int) -> None:
        self.router.first_token(self.held[index % len(self.held)], self.now_s)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100), cached=st.none() | st.integers(0, 500), completed=st.booleans())
    def finish(self, index: int, cached: int | None, completed: bool) -> None:
        reservation = self.held.pop(index % len(self.held))
        usage = Usage(prompt_tokens=500, completion_tokens=40, cached_tokens=cached)
        self.router.release(reservation, self.now_s, usage, completed)

    @rule(name=st.sampled_from(NAMES), running=st.integers(0, 50), waiting=st.integers(0, 50))
    def scrape(self, name: str, running: int, waiting: int) -> None:
        self.router.observe_load(
            BackendId(name), num_running=running, num_waiting=waiting, kv_usage=0.5, now_s=self.now_s
        )

    @invariant()
    def counts_are_exact(self) -> None:
        """In-flight equals what is held, per backend; outstanding work is never negative."""
        expected = Counter(reservation.backend_id for reservation in self.held)
        for backend_id, row in self.router.snapshot().items():
            assert row["in_flight"] == expected[backend_id]
            work_s = row["outstanding_work_s"]
            assert isinstance(work_s, float)
            assert work_s >= 0.0

    def teardown(self) -> None:
        if not hasattr(self, "router"):
            return
        for reservation in self.held:
            self.router.release(reservation, self.now_s, None, completed=False)
        for row in self.router.snapshot().values():
            assert (row["in_flight"], row["outstanding_work_s"]) == (0, 0.0)


PlacementMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestPlacementMachine = PlacementMachine.TestCase


def place(router: Router, count: int, now_s: float, prefix: str = "s") -> dict[str, Binding]:
    """Place and finish `count` new sessions, 10 ms apart."""
    placed = {}
    for number in range(count):
        facts = request(f"{prefix}{number}")
        decision = router.decide(facts, None, now_s + number * 0.01)
        held = router.reserve(facts, decision, now_s + number * 0.01)
        router.release(held, now_s + number * 0.01, None, completed=True)
        placed[f"{prefix}{number}"] = bind(decision)
    return placed


def follow(router: Router, placed: dict[str, Binding], now_s: float) -> dict[str, tuple[Affinity, str]]:
    """Send the next turn of every session; those that move are in flight together until all are sent."""
    found, held = {}, []
    for session, binding in placed.items():
        facts = request(session)
        decision = router.decide(facts, binding, now_s)
        reservation = router.reserve(facts, decision, now_s)
        found[session] = (decision.affinity, str(decision.backend_id))
        if decision.affinity is Affinity.HIT:
            router.release(reservation, now_s, None, completed=True)
        else:
            held.append(reservation)
    for reservation in held:
        router.release(reservation, now_s + 0.5, None, completed=True)
    return found


@pytest.mark.parametrize("count", [3, 8])
def test_lost_backend_moves_exactly_its_own_sessions_and_spreads_them(count: int) -> None:
    """All other sessions stay; the lost ones spread over the survivors, max/mean at most 1.5."""
    router = ready_router(count)
    placed = place(router, 125 * count, 1000.0)
    router.observe_view(fleet(*(backend(name) for name in names(count)[1:]), generation=2), 1100.0)
    found = follow(router, placed, 1100.0)
    lost = {session for session, binding in placed.items() if binding.backend_id == "b0"}
    assert {session for session, (affinity, _) in found.items() if affinity is Affinity.MOVED} == lost
    for session, (affinity, where) in found.items():
        if session not in lost:
            assert affinity is Affinity.HIT
            assert where == placed[session].backend_id
    spread = Counter(found[session][1] for session in lost)
    assert max(spread.values()) / (len(lost) / (count - 1)) <= 1.5


def test_returning_backend_pulls_nothing_back_and_reaches_its_share() -> None:
    """Sessions that moved away stay away; the returned one gets its share of new ones, not a flood."""
    router = ready_router(4, slow_start_s=60.0)
    placed = place(router, 400, 1000.0)
    gone = [backend("b0", state=BackendState.DOWN), *(backend(name) for name in names(4)[1:])]
    router.observe_view(fleet(*gone, generation=2), 1100.0)
    moved = {
        session: Binding(backend_id=BackendId(where), epoch=1, context_tokens=200)
        for session, (_, where) in follow(router, placed, 1100.0).items()
    }
    rows = [backend(n, epoch=2 if n == "b0" else 1, since_s=1200.0 if n == "b0" else 0.0) for n in names(4)]
    router.observe_view(fleet(*rows, generation=3), 1200.0)
    assert all(affinity is Affinity.HIT for affinity, _ in follow(router, moved, 1200.0).values())
    early = Counter(b.backend_id for b in place(router, 200, 1200.0, "early").values())
    late = Counter(b.backend_id for b in place(router, 400, 1270.0, "late").values())
    assert early[BackendId("b0")] <= 0.30 * 200, "not flooded"
    assert 0.15 * 400 <= late[BackendId("b0")] <= 0.35 * 400, "its fair share is a quarter"


def test_restarted_home_does_not_get_all_its_sessions_back_cold() -> None:
    """A new epoch at the same address: its sessions spread over the others, once."""
    router = ready_router(4)
    placed = place(router, 200, 1000.0)
    rows = [backend(name, epoch=2 if name == "b0" else 1) for name in names(4)]
    router.observe_view(fleet(*rows, generation=2), 1100.0)
    found = follow(router, placed, 1100.0)
    lost = [session for session, binding in placed.items() if binding.backend_id == "b0"]
    assert all(found[session][0] is Affinity.MOVED for session in lost)
    spread = Counter(found[session][1] for session in lost)
    assert set(spread) == {"b1", "b2", "b3"}


def test_replicas_agree_on_first_placements_without_talking() -> None:
    """Two routers with the same idle fleet in another order place 500 sessions alike."""
    first, second = ready_router(8), Router(RoutingSettings())
    second.observe_view(fleet(*(backend(name) for name in reversed(names(8)))), 1000.0)
    for number in range(500):
        facts = request(f"s{number}")
        assert first.decide(facts, None, 1000.0).backend_id == second.decide(facts, None, 1000.0).backend_id


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_thousand_backends_and_odd_keys_are_served(policy: str) -> None:
    """Every policy decides among 1,000 backends, for lone surrogates, empty and huge prompts."""
    router = ready_router(1000, policy=policy, virtual_nodes=8)
    for label in ("\ud83d", "", "a\x00b", "x" * 100_000):
        facts = request(label, texts=(label,), size=10**9)
        decision = router.decide(facts, None, 1000.0)
        router.release(router.reserve(facts, decision, 1000.0), 1001.0, None, completed=True)
    with pytest.raises(GatewayError):
        router.decide(request("s"), None, 1000.0, excluded=frozenset(BackendId(n) for n in names(1000)))
