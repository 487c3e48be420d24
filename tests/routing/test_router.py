"""The router's decisions by example: affinity, states, models, loss and return of backends."""

from __future__ import annotations

from collections import Counter

import pytest
from routing.routing_worlds import backend, bind, fleet, names, ready_router, request

from gateway.errors import ModelNotFound, NoBackend
from gateway.routing.router import Router
from gateway.routing.settings import RoutingSettings
from gateway.values import Affinity, BackendId, BackendState, Binding, Usage


def test_bound_session_stays_at_its_home() -> None:
    """A session with a live binding is a HIT at its home on every turn."""
    router = ready_router(8)
    first = router.decide(request("s"), None, 1000.0)
    assert (first.affinity, first.reason) == (Affinity.NEW, "new_placement")
    router.release(router.reserve(request("s"), first, 1000.0), 1001.0, None, completed=True)
    again = router.decide(request("s"), bind(first), 1010.0)
    assert (again.backend_id, again.affinity, again.reason) == (first.backend_id, Affinity.HIT, "home")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": BackendState.DOWN}, "home_down"),
        ({"state": BackendState.JOINING}, "home_down"),
        ({"state": BackendState.DRAINING}, "home_draining"),
        ({"state": BackendState.REMOVED}, "home_removed"),
        ({"epoch": 2}, "home_restarted"),
        ({"models": frozenset({"other"})}, "home_lacks_model"),
    ],
)
def test_lost_home_moves_the_session_and_says_why(change: dict[str, object], reason: str) -> None:
    """A home that cannot keep the session any more gives MOVED with its cause, elsewhere."""
    router = ready_router(4)
    facts = request("s", model="m")
    first = router.decide(facts, None, 1000.0)
    lost = [backend(n, **(change if n == first.backend_id else {})) for n in names(4)]
    router.observe_view(fleet(*lost, generation=2), 1001.0)
    moved = router.decide(facts, bind(first), 1002.0)
    assert (moved.affinity, moved.reason) == (Affinity.MOVED, reason)
    assert moved.backend_id != first.backend_id


def test_cordoned_home_keeps_its_sessions_but_takes_no_new_one() -> None:
    """A cordoned backend serves the sessions bound to it and no others."""
    router = ready_router(2)
    first = router.decide(request("s"), None, 1000.0)
    rows = [
        backend(n, state=BackendState.CORDONED if n == first.backend_id else BackendState.READY)
        for n in names(2)
    ]
    router.observe_view(fleet(*rows, generation=2), 1001.0)
    assert router.decide(request("s"), bind(first), 1002.0).affinity is Affinity.HIT
    assert all(
        router.decide(request(f"n{i}"), None, 1002.0).backend_id != first.backend_id for i in range(20)
    )


def test_excluded_backends_are_never_chosen_again() -> None:
    """Fail-over excludes every backend tried, and the last one leaves NoBackend with Retry-After."""
    router = ready_router(3)
    tried: set[BackendId] = set()
    for _ in range(3):
        decision = router.decide(request("s"), None, 1000.0, excluded=frozenset(tried))
        assert decision.backend_id not in tried
        assert decision.affinity is (Affinity.FAILOVER if tried else Affinity.NEW)
        tried.add(decision.backend_id)
    with pytest.raises(NoBackend) as caught:
        router.decide(request("s"), None, 1000.0, excluded=frozenset(tried))
    assert caught.value.retry_after_s == 2.0


def test_empty_fleet_and_unknown_model_have_their_own_errors() -> None:
    """No backend at all is 503 with Retry-After; a model that nobody serves is 404."""
    with pytest.raises(NoBackend) as caught:
        Router(RoutingSettings()).decide(request("s"), None, 0.0)
    assert caught.value.retry_after_s
    router = Router(RoutingSettings())
    router.observe_view(fleet(backend("a", models=frozenset({"x"}))), 0.0)
    with pytest.raises(ModelNotFound):
        router.decide(request("s", model="y"), None, 0.0)
    assert router.decide(request("s", model="x"), None, 0.0).backend_id == "a"


def test_lower_tiers_serve_only_when_nothing_better_is_left() -> None:
    """READY comes before draining or weight 0; DOWN is never used."""
    rows = {
        "ready": backend("ready"),
        "zero": backend("zero", weight=0.0),
        "down": backend("down", state=BackendState.DOWN),
    }
    router = Router(RoutingSettings())
    lost = Binding(backend_id=BackendId("gone"), epoch=0)
    for expected in ("ready", "zero"):
        router.observe_view(fleet(*rows.values()), 0.0)
        assert {router.decide(request(f"s{i}"), lost, 0.0).backend_id for i in range(30)} == {expected}
        rows[expected] = backend(expected, state=BackendState.DOWN)
    router.observe_view(fleet(*rows.values()), 0.0)
    with pytest.raises(NoBackend):
        router.decide(request("s"), lost, 0.0)


def test_a_degraded_backend_gets_three_sessions_at_a_time() -> None:
    """Sessions without a home try it, never a fail-over or a session at home; alone, it gets all."""
    rows = [backend("ready"), backend("degraded", state=BackendState.DEGRADED)]
    router = Router(RoutingSettings())
    router.observe_view(fleet(*rows), 0.0)
    at_home = Binding(backend_id=BackendId("ready"), epoch=rows[0].epoch)
    assert router.decide(request("h"), at_home, 0.0).affinity is Affinity.HIT
    retried = router.decide(request("r"), None, 0.0, excluded=frozenset({BackendId("other")}))
    assert retried.backend_id == "ready"
    spared = router.decide(request("a"), None, 0.0, avoided=frozenset({BackendId("degraded")}))
    assert spared.backend_id == "ready"
    held, chosen = [], []
    for number in range(5):
        decision = router.decide(request(f"s{number}"), None, 0.0)
        chosen.append(decision.backend_id)
        held.append(router.reserve(request(f"s{number}"), decision, 0.0))
    assert chosen == ["degraded"] * 3 + ["ready"] * 2
    router.release(held[0], 1.0, None, completed=True)
    assert router.decide(request("again"), None, 1.0).backend_id == "degraded"
    lost_home = Binding(backend_id=BackendId("degraded"), epoch=rows[1].epoch)
    moved = router.decide(request("b"), lost_home, 1.0)
    assert (moved.backend_id, moved.affinity) == ("degraded", Affinity.MOVED)
    router.observe_view(fleet(rows[1]), 2.0)
    assert router.decide(request("c"), None, 2.0).backend_id == "degraded"


def test_new_sessions_never_go_where_operators_closed() -> None:
    """With only draining, cordoned or weight-0 backends left, a session without a home is refused."""
    router = Router(RoutingSettings())
    closed = (
        backend("zero", weight=0.0),
        backend("drains", state=BackendState.DRAINING),
        backend("cordoned", state=BackendState.CORDONED),
    )
    router.observe_view(fleet(*closed), 0.0)
    with pytest.raises(NoBackend):
        router.decide(request("s"), None, 0.0)


def test_an_unstreamed_answer_does_not_look_like_a_queue() -> None:
    """Its prefill counts as done once it must be, though nothing is seen until the whole answer comes."""
    router = ready_router(2)
    held = []
    for index in range(10):
        facts = request(f"s{index}")
        held.append(router.reserve(facts, router.decide(facts, None, 0.0), 0.0))
    assert sum(work_s for work_s, _ in router.loads().values()) > 0
    late = request("late")
    held.append(router.reserve(late, router.decide(late, None, 600.0), 600.0))
    work = router.loads()[held[-1].backend_id]
    assert sum(work_s for work_s, _ in router.loads().values()) == work[0] == held[-1].prefill_s
    for reservation in held:
        router.release(reservation, 601.0, None, completed=True)
    assert set(router.loads().values()) == {(0.0, 0)}


def test_requests_without_any_key_spread_by_load() -> None:
    """400 requests without a key over 8 idle backends: the busiest gets at most 1.5 × the least."""
    router = ready_router(8)
    counts: Counter[str] = Counter()
    for index in range(400):
        facts = request(texts=(f"question {index}",))
        decision = router.decide(facts, None, 1000.0 + index)
        assert (decision.affinity, decision.reason) == (Affinity.UNPINNED, "no_key")
        counts[decision.backend_id] += 1
        router.release(router.reserve(facts, decision, 1000.0 + index), 1000.5 + index, None, completed=True)
    assert len(counts) == 8
    assert max(counts.values()) / min(counts.values()) <= 1.5


def test_prompt_groups_have_stable_places_and_the_hot_one_is_bounded() -> None:
    """Fifty system prompts keep their place while idle; one hot prompt never exceeds the load bound."""
    router = ready_router(8)
    places: dict[int, set[str]] = {}
    for turn in range(8):
        for group in range(50):
            facts = request(prompt=f"You are agent {group}", texts=(f"q{turn}",))
            decision = router.decide(facts, None, 1000.0 + turn * 50 + group)
            places.setdefault(group, set()).add(decision.backend_id)
            held = router.reserve(facts, decision, 1000.0 + turn * 50 + group)
            router.release(held, 1000.5 + turn * 50 + group, None, completed=True)
    assert all(len(backends) == 1 for backends in places.values())
    for index in range(1000):
        facts = request(prompt="You are a helpful assistant.", texts=(f"hot {index}",))
        router.reserve(facts, router.decide(facts, None, 2000.0), 2000.0)
        load = [router.in_flight(BackendId(n)) for n in names(8)]
        assert max(load) <= max(4, 1.25 * (sum(load) / 8 + 1) + 1)


def test_release_returns_every_count_to_zero_and_is_exactly_once() -> None:
    """In-flight and outstanding work are zero when all is released; a second release is our bug."""
    router = ready_router(2)
    held = []
    for index in range(50):
        facts = request(f"s{index}")
        held.append(router.reserve(facts, router.decide(facts, None, 1000.0), 1000.0))
    for index, reservation in enumerate(held):
        if index % 2:
            router.first_token(reservation, 1001.0)
        router.release(
            reservation, 1002.0, Usage(prompt_tokens=90, cached_tokens=0), completed=bool(index % 3)
        )
    for row in router.snapshot().values():
        assert row["in_flight"] == 0
        assert row["outstanding_work_s"] == 0.0
    with pytest.raises(AssertionError):
        router.release(held[0], 1003.0, None, completed=True)


def test_expected_tokens_are_whole_blocks() -> None:
    """V07: an engine with blocks of 128 tokens reports no part of one."""
    router = Router(RoutingSettings())
    router.observe_view(fleet(backend("b0", kv_block_tokens=128)), 1000.0)
    facts = request("s", texts=("a", "b"), size=4_000)
    first = router.decide(facts, None, 1000.0)
    router.release(router.reserve(facts, first, 1000.0), 1001.0, None, completed=True)
    again = router.decide(request("s", texts=("a", "b", "c"), size=4_000), bind(first), 1010.0)
    held = again.prompt_tokens * 2 // 3
    assert again.expected_cached_tokens == held - held % 128
    assert held % 128 != 0
