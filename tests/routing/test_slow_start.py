"""Joining backends get their share of new sessions even when every price speaks against them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from routing.routing_worlds import backend, bind, fleet, names, request

from gateway.routing.router import Router
from gateway.routing.settings import RoutingSettings
from gateway.routing.slow_start import SlowStart
from gateway.values import BackendId

PROMPT = "a system prompt that every session has " * 200


def serve_new(router: Router, session: str, now_s: float) -> BackendId:
    facts = request(session, prompt=PROMPT)
    decision = router.decide(facts, None, now_s)
    router.release(router.reserve(facts, decision, now_s), now_s + 0.1, None, completed=True)
    return decision.backend_id


def test_a_joining_backend_is_neither_starved_nor_flooded() -> None:
    """All sessions share one prompt that the others hold: the late backend still gets a fair share."""
    settings = RoutingSettings(slow_start_s=60.0)
    router = Router(settings)
    rows = [backend(name) for name in names(4)]
    router.observe_view(fleet(*rows), 0.0)
    for name in names(4):  # the prompt is popular: each of them holds it
        facts = request(f"first at {name}", prompt=PROMPT)
        decision = router.decide(facts, None, 100.0)
        held = router.reserve(facts, decision, 100.0, backend_id=BackendId(name))
        router.release(held, 101.0, None, completed=True)
    for number in range(400):
        serve_new(router, f"old{number}", 110.0 + number * 0.1)
    rows.append(backend("late", since_s=200.0))
    router.observe_view(fleet(*rows, generation=2), 200.0)
    early = [serve_new(router, f"early{number}", 200.0 + number * 0.06) for number in range(100)]
    assert 1 <= early.count(BackendId("late")) <= 30  # of 100; its full share would be 20
    for number in range(900):
        serve_new(router, f"mid{number}", 206.0 + number * 0.06)
    late = [serve_new(router, f"late{number}", 262.0 + number * 0.06) for number in range(200)]
    assert 20 <= late.count(BackendId("late")) <= 70


def test_a_bound_session_is_never_taken_for_a_new_one() -> None:
    """Credit buys new sessions only."""
    router = Router(RoutingSettings(slow_start_s=60.0))
    rows = [backend(name) for name in names(3)]
    router.observe_view(fleet(*rows), 0.0)
    facts = request("alice", prompt=PROMPT)
    first = router.decide(facts, None, 100.0)
    router.release(router.reserve(facts, first, 100.0), 100.1, None, completed=True)
    router.observe_view(fleet(*rows, backend("late", since_s=150.0), generation=2), 150.0)
    for number in range(60):
        serve_new(router, f"s{number}", 160.0 + number * 0.1)
        assert router.decide(facts, bind(first), 160.0 + number * 0.1).backend_id == first.backend_id


@given(st.lists(st.tuples(st.integers(0, 4), st.sets(st.integers(0, 4))), max_size=60))
def test_credit_stays_small_and_belongs_to_warming_slots(events: list[tuple[int, set[int]]]) -> None:
    """Whatever joins and whatever is chosen, nobody is owed more than two sessions, and the warm nothing."""
    slow_start = SlowStart()
    for chosen, warming in events:
        slow_start.note_new_session(chosen, dict.fromkeys(warming, 0.25))
        assert slow_start._credit.keys() <= warming
        assert all(0.0 <= credit <= 2.0 for credit in slow_start._credit.values())
        owed = slow_start.owed(range(5))
        assert owed is None or owed in warming
