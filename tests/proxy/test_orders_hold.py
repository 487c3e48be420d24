"""Operators' orders over a Redis that is frozen, restarted or emptied.

What was accepted holds everywhere, and the answer says while it is not shared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.gateway_world import GatewayWorld
from fakes.redis_server import RedisProcess, redis_server, require_redis_server

from gateway.config.config import parse_config
from gateway.process.gateway import Gateway
from gateway.values import BackendId

pytestmark = pytest.mark.redis
LIMIT_S = 20.0


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    require_redis_server()
    with redis_server(tmp_path) as process:
        yield process


def two_gateways(redis: RedisProcess, num_backends: int = 2) -> GatewayWorld:
    settings = {"url": redis.url, "budget_ms": 500, "socket_timeout_ms": 500}
    sessions = {"store": "redis", "redis": settings}
    return GatewayWorld(num_backends=num_backends, num_gateways=2, sessions=sessions)


async def order(
    world: GatewayWorld, method: str, path: str, *, at: int = 0, body: Any = None
) -> httpx.Response:
    return await world.admins[at].request(method, f"/admin/v1/backends{path}", json=body, timeout=30)


def states(gateway: Gateway) -> dict[str, str]:
    return {backend_id: backend.state.value for backend_id, backend in gateway.fleet.view.backends.items()}


async def all_show(world: GatewayWorld, expected: dict[str, str]) -> None:
    """Until every gateway shows these states and knows that its orders are stored; then they still hold
    after one more exchange."""

    def agree() -> bool:
        operators = [gateway.operator for gateway in world.gateways]
        are_told = all(operator.is_shared(*operator.orders()) for operator in operators)
        return are_told and all(states(gateway) == expected for gateway in world.gateways)

    await world.wait_for(agree, LIMIT_S)
    await asyncio.sleep(1.2)
    assert [states(gateway) for gateway in world.gateways] == [expected, expected]


async def test_a_drain_accepted_while_redis_is_frozen_holds_everywhere(redis: RedisProcess) -> None:
    """C01: 202 and not shared; when Redis returns, both drain and the order is shown as shared."""
    async with two_gateways(redis) as world:
        redis.pause()
        answer = await order(world, "POST", "/b0/drain", body={"deadline_s": 600})
        assert answer.status_code == 202
        assert [(one["wants"], one["is_shared"]) for one in answer.json()["orders"]] == [("draining", False)]
        assert states(world.gateways[0])["b0"] == "draining"
        redis.resume()
        await all_show(world, {"b0": "draining", "b1": "ready"})
        shown = (await order(world, "GET", "/b0", at=1)).json()
        assert [(one["wants"], one["is_shared"]) for one in shown["orders"]] == [("draining", True)]


async def test_an_undrain_accepted_while_redis_is_frozen_holds_everywhere(redis: RedisProcess) -> None:
    """C01: the drain that Redis still has does not come back."""
    async with two_gateways(redis) as world:
        assert (await order(world, "POST", "/b0/drain", body={"deadline_s": 600})).status_code == 200
        await all_show(world, {"b0": "draining", "b1": "ready"})
        redis.pause()
        assert (await order(world, "POST", "/b0/undrain", at=1)).status_code == 202
        redis.resume()
        await all_show(world, {"b0": "ready", "b1": "ready"})


async def test_a_removal_accepted_while_redis_is_frozen_holds_everywhere(redis: RedisProcess) -> None:
    """C01: 202 with the order in place of 204; the backend goes at both, and the orders are listed."""
    async with two_gateways(redis) as world:
        redis.pause()
        answer = await order(world, "DELETE", "/b0")
        assert answer.status_code == 202
        (told,) = answer.json()["orders"]
        assert (told["backend"], told["wants"], told["is_shared"]) == ("b0", "removed", False)
        redis.resume()
        await all_show(world, {"b1": "ready"})
        listed = (await world.admins[1].get("/admin/v1/orders")).json()["orders"]
        assert [(one["backend"], one["wants"], one["is_shared"]) for one in listed] == [
            ("b0", "removed", True)
        ]


@pytest.mark.parametrize("is_added_everywhere", [True, False])
@pytest.mark.parametrize("is_emptied", [True, False])
async def test_a_backend_added_again_while_redis_is_away_is_present_everywhere(
    redis: RedisProcess, *, is_emptied: bool, is_added_everywhere: bool
) -> None:
    """C02: removed, Redis away, added again at both gateways or at one: present at both when Redis returns,
    with the removal that it remembers or without."""
    async with two_gateways(redis) as world:
        spec = {"id": "b0", "url": world.backends[0].base_url, "engine": "vllm"}
        assert (await order(world, "DELETE", "/b0")).status_code == 204
        await all_show(world, {"b1": "ready"})
        if is_emptied:
            redis.kill()
        else:
            redis.pause()
        for at in (0, 1) if is_added_everywhere else (1,):
            assert (await order(world, "POST", "", at=at, body=spec)).status_code == 202
        if is_emptied:
            redis.start()
        else:
            redis.resume()
        await all_show(world, {"b0": "ready", "b1": "ready"})
        assert (await order(world, "POST", "", body=spec)).status_code == 200


@pytest.mark.parametrize("is_restarted", [True, False])
async def test_orders_stand_though_redis_was_emptied(redis: RedisProcess, *, is_restarted: bool) -> None:
    """C03: FLUSHALL, or a restart without persistence: drains and removals hold, and a gateway that starts
    later obeys them before it serves."""
    async with two_gateways(redis, num_backends=4) as world:
        await order(world, "POST", "/b0/drain", body={"deadline_s": 600})
        await order(world, "DELETE", "/b1", at=1)
        await order(world, "POST", "/b2/cordon")
        await order(world, "PATCH", "/b3", body={"weight": 5})
        expected = {"b0": "draining", "b2": "cordoned", "b3": "ready"}
        await all_show(world, expected)
        if is_restarted:
            redis.kill()
            redis.start()
        else:
            redis.ask("FLUSHALL")
        await world.wait_for(lambda: b"1" in redis.ask("EXISTS", "homing:{00}:orders"), LIMIT_S)
        await all_show(world, expected)
        later = Gateway(parse_config(world.data), environ={})
        await later.start()
        try:
            assert later.fleet.view.backends.keys() == expected.keys()
            assert later.fleet.view.backends[BackendId("b3")].weight == 5
            assert later.fleet.drain_left_s(BackendId("b0")) is not None
            await world.wait_for(lambda: states(later) == expected, LIMIT_S)
        finally:
            await later.stop(drain_timeout_s=0)


async def test_every_key_in_redis_has_a_time_to_live(redis: RedisProcess) -> None:
    """H07: the orders' too, and exchanges renew it."""
    async with two_gateways(redis) as world:
        await order(world, "DELETE", "/b0")
        await world.chat("alice")
        await all_show(world, {"b1": "ready"})
        keys = await world.gateway.sessions.link.command("KEYS", "*")  # type: ignore[attr-defined]
        assert any(key.endswith(b":orders") for key in keys)
        for key in keys:
            assert await world.gateway.sessions.link.command("PTTL", key) > 0, key  # type: ignore[attr-defined]
