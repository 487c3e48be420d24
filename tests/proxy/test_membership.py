"""Backends come and go: placement follows at once, and depends on nothing but the fleet and the key."""

from __future__ import annotations

import collections

from fakes.gateway_world import GatewayWorld, ProbedBackend

from gateway.config.config import parse_config
from gateway.process.gateway import Gateway
from gateway.routing.health import Outcome
from gateway.routing.router import Router
from gateway.routing.settings import RoutingSettings
from gateway.values import (
    Api,
    Backend,
    BackendId,
    BackendState,
    FleetView,
    KeySource,
    RequestFacts,
    SessionKey,
)


async def test_an_added_backend_gets_its_share_at_once_and_disturbs_nobody() -> None:
    """B07: a fourth backend is added: old sessions keep their homes, about a quarter of new ones come."""
    async with (
        GatewayWorld(num_backends=3, routing={"slow_start_s": 0.5}) as world,
        ProbedBackend() as fourth,
    ):
        homes = {f"s{n}": (await world.chat(f"s{n}")).headers["x-homing-backend"] for n in range(90)}
        added = await world.admin.post(
            "/admin/v1/backends", json={"id": "b3", "url": fourth.base_url, "engine": "vllm"}
        )
        assert added.status_code == 201
        await world.wait_for(lambda: world.state(3) == "ready")
        for session, home in homes.items():
            assert (await world.chat(session)).headers["x-homing-backend"] == home
        fresh: collections.Counter[str] = collections.Counter()
        for number in range(120):
            fresh[(await world.chat(f"new-{number}")).headers["x-homing-backend"]] += 1
        assert 12 <= fresh["b3"] <= 48


async def test_placement_does_not_depend_on_the_order_or_spelling_of_the_fleet() -> None:
    """B07: idle replicas with the backends in another order and other spellings of their URLs place alike."""
    async with GatewayWorld(num_backends=4) as world:
        backends = [
            {"id": f"b{number}", "url": f"{backend.base_url.upper()}/v1/", "engine": "vllm"}
            for number, backend in reversed(list(enumerate(world.backends)))
        ]
        listen = {"listen": {"port": 0}, "admin": {"port": 0}, "log": {"access": False, "level": "error"}}
        other = Gateway(parse_config({**listen, "backends": backends}), environ={})
        for number in range(4):
            other.fleet.add(world.gateway.fleet.view.backends[BackendId(f"b{number}")])
        for backend_id in list(other.fleet.view.backends):
            for _ in range(3):
                other.fleet.observe_probe(backend_id, Outcome.SUCCESS)
        placed = {}
        for number in range(200):
            facts = facts_of(f"{number:032x}")
            placed[number] = world.gateway.router.decide(facts, None, 1e6).backend_id
            assert other.router.decide(facts, None, 1e6).backend_id == placed[number]
        assert len(set(placed.values())) == 4
        await other.stop(drain_timeout_s=0)


def facts_of(key: str) -> RequestFacts:
    return RequestFacts(
        api=Api.CHAT,
        model="fake-model",
        session_key=SessionKey(key),
        key_source=KeySource.HEADER,
        num_prompt_bytes=40,
    )


def test_hundreds_of_changes_in_a_large_fleet() -> None:
    """B08: backends leave and return 500 times, 200 in all, under load; nothing fails or is left over."""
    router = Router(RoutingSettings(virtual_nodes=16))
    rows = {
        BackendId(f"b{number}"): Backend(
            backend_id=BackendId(f"b{number}"), base_url=f"http://10.0.0.1:{number}", state=BackendState.READY
        )
        for number in range(200)
    }
    held = []
    for cycle in range(500):
        leaving = BackendId(f"b{cycle % 200}")
        rows_now = {name: row for name, row in rows.items() if cycle % 2 or name != leaving}
        router.observe_view(FleetView(generation=cycle + 1, backends=rows_now), float(cycle))
        decision = router.decide(facts_of(f"{cycle:032x}"), None, float(cycle))
        assert decision.backend_id in rows_now
        held.append(router.reserve(facts_of(f"{cycle:032x}"), decision, float(cycle)))
        if len(held) > 20:
            router.release(held.pop(0), float(cycle), None, completed=True)
    for reservation in held:
        router.release(reservation, 501.0, None, completed=False)
    assert set(router.loads().values()) == {(0.0, 0)}
