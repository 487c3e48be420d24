"""What one sees in a debugger: one status line for each part of routing."""

from __future__ import annotations

from routing.routing_worlds import chain, ready_router, request

from gateway.routing.health import HealthSettings, HealthTable, Outcome
from gateway.routing.ring import Ring
from gateway.routing.shadow import Shadow
from gateway.values import BackendId


def test_a_router_and_its_parts_show_their_state() -> None:
    """Counts of backends, requests, points, lines and bytes, without addresses in memory."""
    router = ready_router(3, virtual_nodes=4)
    facts = request("s")
    router.reserve(facts, router.decide(facts, None, 1000.0), 1000.0)
    candidates = "<Candidates 3 ready of 3, <Ring 3 backends, 12 points>>"
    assert repr(router) == f"<Router homing: 1 in flight, {candidates}>"
    assert repr(Ring({}, 160)) == "<Ring 0 backends, 0 points>"
    shadow = Shadow(10)
    shadow.set_capacity(0, 100)
    shadow.insert(0, chain("system", "question", size=20))
    assert repr(shadow) == "<Shadow 2 lines of 1 backends, 40/100 bytes>"


def test_a_health_table_shows_who_is_up() -> None:
    """Suspects are the backends that are down or failing."""
    table = HealthTable(HealthSettings(healthy_after=1))
    table.observe_probe(BackendId("a"), Outcome.SUCCESS, 0.0)
    table.observe_probe(BackendId("b"), Outcome.FAILURE, 0.0)
    assert repr(table) == "<HealthTable 1 up of 2, 1 suspect>"
