"""Cordon, drain, undrain, remove: who stays, who moves, when, and what the admin API shows of it."""

from __future__ import annotations

import asyncio
import collections
import json
from typing import Any

import pytest
from fakes import backend as fake
from fakes.gateway_world import GatewayWorld

from gateway.values import BackendId


async def bind(world: GatewayWorld, count: int) -> dict[str, str]:
    """Sessions and their homes."""
    return {f"s{n}": (await world.chat(f"s{n}")).headers["x-homing-backend"] for n in range(count)}


async def show(world: GatewayWorld, backend_id: str) -> dict[str, Any]:
    shown: dict[str, Any] = (await world.admin.get(f"/admin/v1/backends/{backend_id}")).json()
    return shown


async def test_a_drain_moves_sessions_at_their_next_turn_and_spreads_them() -> None:
    """B57: no new session comes, bound ones move once, over several backends; progress is shown."""
    async with GatewayWorld(num_backends=4) as world:
        homes = await bind(world, 60)
        leaving = [session for session, home in homes.items() if home == "b0"]
        answer = await world.admin.post("/admin/v1/backends/b0/drain", json={"deadline_s": 60})
        assert answer.status_code == 200
        assert answer.json()["drain"]["sessions"] == len(leaving)
        assert not answer.json()["drain"]["is_drained"]
        for number in range(20):
            assert (await world.chat(f"new-{number}")).headers["x-homing-backend"] != "b0"
        moved: collections.Counter[str] = collections.Counter()
        for session in leaving:
            first, second = await world.chat(session), await world.chat(session)
            assert (first.headers["x-homing-affinity"], first.headers["x-homing-reason"]) == (
                "moved",
                "home_draining",
            )
            assert second.headers["x-homing-affinity"] == "hit"
            moved[second.headers["x-homing-backend"]] += 1
        assert len(moved) > 1  # spread, not handed to one victim
        for session in homes.keys() - set(leaving):
            assert (await world.chat(session)).headers["x-homing-backend"] == homes[session]
        assert (await show(world, "b0"))["drain"]["is_drained"]


async def test_running_streams_finish_on_a_draining_backend() -> None:
    """B57: what runs is not cut."""
    gate = asyncio.Event()
    event = b'data: {"choices":[{"index":0,"delta":{"content":"Hel"}}]}\n\n'
    async with GatewayWorld(num_backends=2) as world:
        home = (await world.chat("alice")).headers["x-homing-backend"]
        world.backends[int(home[1:])].default = fake.stream(event, b"data: [DONE]\n\n", gates={1: gate})
        running = asyncio.ensure_future(world.chat("alice", stream=True))
        await world.wait_for(lambda: world.gateway.router.in_flight(BackendId(home)) == 1)
        await world.admin.post(f"/admin/v1/backends/{home}/drain")
        assert (await show(world, home))["drain"]["in_flight"] == 1
        gate.set()
        answer = await running
        assert answer.text.endswith("data: [DONE]\n\n")


async def test_undrain_restores_and_cordon_keeps_bound_sessions() -> None:
    """A cordoned backend keeps its sessions and takes none; undrain takes both back."""
    async with GatewayWorld(num_backends=2) as world:
        homes = await bind(world, 20)
        await world.admin.post("/admin/v1/backends/b0/cordon")
        for session, home in homes.items():
            assert (await world.chat(session)).headers["x-homing-backend"] == home
        for number in range(10):
            assert (await world.chat(f"new-{number}")).headers["x-homing-backend"] == "b1"
        await world.admin.post("/admin/v1/backends/b0/undrain")
        later = {(await world.chat(f"later-{number}")).headers["x-homing-backend"] for number in range(20)}
        assert later == {"b0", "b1"}


async def test_draining_the_last_backend_refuses_new_sessions() -> None:
    """B57: with everything draining, 503 with Retry-After."""
    async with GatewayWorld(num_backends=1) as world:
        await world.admin.post("/admin/v1/backends/b0/drain")
        answer = await world.chat("alice")
        assert answer.status_code == 503
        assert "retry-after" in answer.headers


async def test_a_removed_backend_loses_exactly_its_own_sessions() -> None:
    """Only its sessions move, spread with max/mean at most 1.5; added again, it takes new ones, not those."""
    async with GatewayWorld(num_backends=5, routing={"slow_start_s": 1.0}) as world:
        homes = await bind(world, 300)
        assert (await world.admin.delete("/admin/v1/backends/b0")).status_code == 204
        now = {session: (await world.chat(session)).headers["x-homing-backend"] for session in homes}
        assert {session for session in homes if now[session] != homes[session]} == {
            session for session, home in homes.items() if home == "b0"
        }
        moved = collections.Counter(now[session] for session, home in homes.items() if home == "b0")
        assert max(moved.values()) <= 1.5 * sum(moved.values()) / 4 + 1
        await world.wait_for(lambda: all(age_s > 1.0 for age_s in world.ages_s()))  # the others are warm
        spec = {"id": "b0", "url": world.backends[0].base_url, "engine": "vllm"}
        assert (await world.admin.post("/admin/v1/backends", json=spec)).status_code == 201
        await world.wait_for(lambda: world.state(0) == "ready")
        fresh: collections.Counter[str] = collections.Counter()
        for number in range(250):
            fresh[(await world.chat(f"fresh-{number}")).headers["x-homing-backend"]] += 1
        assert 20 <= fresh["b0"] <= 80  # its fair share would be 50, had it not begun slowly
        for session in homes:
            assert (await world.chat(session)).headers["x-homing-backend"] == now[session]


async def test_prewarm_computes_the_largest_sessions_at_their_new_homes() -> None:
    """Prewarm on: the largest session's prompt is replayed elsewhere, for one token, and bound there."""
    settings = {"prewarm_sessions": 1, "prewarm_per_s": 100.0}
    async with GatewayWorld(num_backends=2, fleet=settings) as world:

        def usage(tokens: int) -> Any:
            return fake.respond(json.dumps({"choices": [], "usage": {"prompt_tokens": tokens}}).encode())

        homes = {}
        for session, tokens in (("small", 10), ("large", 9000), ("medium", 500)):
            for backend in world.backends:
                backend.default = usage(tokens)
            homes[session] = (await world.chat(session, text=f"prompt of {session}")).headers[
                "x-homing-backend"
            ]
        home = homes["large"]
        other = world.backends[1 - int(home[1:])]
        before = len(other.requests)
        await world.admin.post(f"/admin/v1/backends/{home}/drain")
        await world.wait_for(lambda: len(other.requests) > before)
        replay = other.requests[-1].json
        assert (replay["max_tokens"], replay["stream"]) == (1, False)
        assert replay["messages"] == [{"role": "user", "content": "prompt of large"}]
        async with asyncio.timeout(5):
            while not (await show(world, home))["drain"]["prewarm"]["is_done"]:
                await asyncio.sleep(0.01)
        assert (await show(world, home))["drain"]["prewarm"]["warmed"] == 1
        assert (await world.chat("large")).headers["x-homing-affinity"] == "hit"
        world.assert_idle()


@pytest.mark.parametrize("path", ["/admin/v1/backends/b9/drain", "/admin/v1/backends/b9/undrain"])
async def test_an_unknown_backend_is_404_with_the_known_names(path: str) -> None:
    """Admin errors are problem details that help."""
    async with GatewayWorld(num_backends=1) as world:
        answer = await world.admin.post(path)
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"
        assert "backends in the fleet: b0" in answer.json()["detail"]


async def test_a_drain_until_restart_is_over_when_the_backend_returns() -> None:
    """A pod that drains itself before it stops need not find somebody to undrain it when it is back."""
    async with GatewayWorld(num_backends=2) as world:
        order = {"until_restart": True}
        assert (await world.admin.post("/admin/v1/backends/b0/drain", json=order)).status_code == 200
        assert world.state(0) == "draining"
        port = world.backends[0].port
        await world.backends[0].stop()
        await world.wait_for(lambda: world.state(0) == "down")
        world.backends[0].start_time_s += 100
        await world.backends[0].start(port)
        await world.wait_for(lambda: world.state(0) == "ready")
