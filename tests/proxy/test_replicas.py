"""Several gateways, one truth: with a real Redis, without it, and when it goes away half-way."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.gateway_world import GatewayWorld
from fakes.redis_server import RedisProcess, redis_server, require_redis_server

from gateway.redis_link.breaker import BreakerState
from gateway.values import BackendId

pytestmark = pytest.mark.redis
NUM_SESSIONS, NUM_TURNS = 100, 10


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    require_redis_server()
    with redis_server(tmp_path) as process:
        yield process


def shared(redis: RedisProcess, **options: Any) -> dict[str, Any]:
    """Configuration of gateways that share this Redis."""
    # everything in a test runs in one event loop, so a budget for one gateway's loop would be too short
    settings = {"url": redis.url, "local_ttl_s": 2.0, "budget_ms": 1000, "breaker_failures": 10, **options}
    return {"sessions": {"store": "redis", "redis": settings}}


async def play(world: GatewayWorld, turns: range, num_sessions: int = NUM_SESSIONS) -> dict[int, list[str]]:
    """Every session's turns in order, twenty sessions at once, gateways in rotation."""
    homes: dict[int, list[str]] = {session: [] for session in range(num_sessions)}

    async def one(session: int) -> None:
        for turn in turns:
            at = (session + turn) % len(world.gateways)
            answer = await world.chat(f"session-{session}", text=f"turn {turn}", at=at)
            assert answer.status_code == 200
            homes[session].append(answer.headers["x-homing-backend"])

    for start in range(0, num_sessions, 20):
        await asyncio.gather(*(one(session) for session in range(start, min(start + 20, num_sessions))))
    return homes


def share_at_home(homes: dict[int, list[str]]) -> float:
    """Of all turns, how many went where the session's first turn went."""
    turns = [backend == backends[0] for backends in homes.values() for backend in backends]
    return sum(turns) / len(turns)


async def test_turns_scattered_over_gateways_come_home(redis: RedisProcess) -> None:
    """B16: two gateways in rotation, 100 sessions × 10 turns: at least 99 % on one backend each."""
    async with GatewayWorld(num_backends=4, num_gateways=2, **shared(redis)) as world:
        homes = await play(world, range(NUM_TURNS))
        assert share_at_home(homes) >= 0.99
        by_backend = collections.Counter(backends[0] for backends in homes.values())
        assert len(by_backend) == 4
        world.assert_idle()


async def test_redis_killed_half_way_costs_no_error_and_no_home(redis: RedisProcess) -> None:
    """Half the turns, kill Redis, the other half: no 5xx, and at least 99 % still at home."""
    options = shared(redis, local_ttl_s=600.0)  # on a slow machine too they remember the first half
    async with GatewayWorld(num_backends=4, num_gateways=2, **options) as world:
        first = await play(world, range(NUM_TURNS // 2))
        redis.kill()
        second = await play(world, range(NUM_TURNS // 2, NUM_TURNS))
        homes = {session: first[session] + second[session] for session in first}
        assert share_at_home(homes) >= 0.99
        for client in world.clients:
            ready = await client.get("/readyz")
            assert ready.status_code == 200
            assert ready.json()["degraded"] == ["session_store"]


async def test_without_redis_from_the_start_the_ring_makes_replicas_agree(redis: RedisProcess) -> None:
    """B16: new sessions land on the same backend whichever gateway they meet, with nothing shared."""
    redis.kill()
    async with GatewayWorld(num_backends=4, num_gateways=3, **shared(redis)) as world:
        homes = await play(world, range(3), num_sessions=60)
        assert share_at_home(homes) >= 0.99


async def test_many_first_turns_at_once_have_one_winner(redis: RedisProcess) -> None:
    """B15: 50 first requests of one session over both gateways: one home, and later turns go there."""
    async with GatewayWorld(num_backends=4, num_gateways=2, **shared(redis)) as world:
        firsts = await asyncio.gather(*(world.chat("race", at=number % 2) for number in range(50)))
        assert {answer.status_code for answer in firsts} == {200}
        later = [await world.chat("race", at=number % 2) for number in range(6)]
        assert len({answer.headers["x-homing-backend"] for answer in later}) == 1
        assert len({answer.headers["x-homing-backend"] for answer in firsts}) == 1


async def test_an_admin_move_is_followed_by_the_other_replica(redis: RedisProcess) -> None:
    """B16: a session moved at gateway 1 is served at its new home by gateway 2, which was told of it."""
    options = shared(redis, local_ttl_s=600.0)  # what it remembers does not expire: it must be told
    async with GatewayWorld(num_backends=4, num_gateways=2, **options) as world:
        home = (await world.chat("alice", at=0)).headers["x-homing-backend"]
        assert (await world.chat("alice", at=1)).headers["x-homing-backend"] == home
        target = next(f"b{number}" for number in range(4) if f"b{number}" != home)
        found = await world.admins[0].get(
            "/admin/v1/sessions", params={"session_id": "alice", "model": "fake-model"}
        )
        key = found.json()["sessions"][0]["key"]
        moved = await world.admins[0].post(f"/admin/v1/sessions/{key}/move", json={"backend": target})
        assert moved.json()["backend"] == target
        async with asyncio.timeout(30.0):
            while (await world.chat("alice", at=1)).headers["x-homing-backend"] != target:
                await asyncio.sleep(0.02)
        assert (await world.chat("alice", at=0)).headers["x-homing-backend"] == target


async def test_a_drain_ordered_at_one_replica_holds_at_the_other(redis: RedisProcess) -> None:
    """B57: soon the other gateway drains too, and takes it back too."""
    async with GatewayWorld(num_backends=2, num_gateways=2, **shared(redis)) as world:
        await world.admins[0].post("/admin/v1/backends/b0/drain", json={"deadline_s": 60})
        view = world.gateways[1].fleet
        b0 = BackendId("b0")
        await world.wait_for(lambda: view.view.backends[b0].state.value == "draining", 30.0)
        for number in range(20):
            answer = await world.chat(f"new-{number}", at=1)
            assert answer.headers["x-homing-backend"] == "b1"
        await world.admins[0].post("/admin/v1/backends/b0/undrain")
        await world.wait_for(lambda: view.view.backends[b0].state.value == "ready", 30.0)


async def test_a_paused_redis_costs_one_budget_and_then_nothing(redis: RedisProcess) -> None:
    """B14: SIGSTOP: no error, the first requests wait at most the budget, later ones do not wait."""
    async with GatewayWorld(num_backends=3, **shared(redis, budget_ms=50, breaker_failures=3)) as world:
        await play(world, range(2), num_sessions=10)
        redis.pause()
        answers = [await world.chat(f"fresh-{number}") for number in range(20)]
        assert {answer.status_code for answer in answers} == {200}
        stats = world.gateway.sessions.stats()
        assert stats.is_degraded
        assert stats.breaker is not BreakerState.CLOSED
        assert stats.errors["timeout"] < 10  # a few requests paid a budget, the others nothing
        redis.resume()
        await world.wait_for(lambda: not world.gateway.sessions.stats().is_degraded, 10.0)
