"""Whatever the gateway writes to Redis has a time to live, but for what operators put there themselves."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time

import pytest
from fakes.gateway_world import GatewayWorld
from fakes.redis_server import RedisProcess
from redis.asyncio import Redis

from gateway.redis_link import key_layout
from gateway.sessions.redis_store import RedisStore
from gateway.values import BackendId, SessionKey

pytestmark = pytest.mark.redis

LIMIT_S = 20.0
KEY = "key-of-tenant-a-0001"
KEPT_FOR_EVER = {"api_keys": "operators add keys with HSET and revoke them with HDEL; no gateway writes here"}
# a line of the documentation is "homing:{07}:s:<session key>   string   …"; its kind is "s"
_LINE = re.compile(r"^ +homing:\{\d\d\}:(\w+)(?::<[^>]+>)? +(?:string|hash|set|zset) ", re.MULTILINE)
KINDS = set(_LINE.findall(key_layout.__doc__ or ""))


async def kinds_in(redis: Redis, *, immortal: bool) -> set[str]:
    """The kinds of keys that are there; only those that never end, if so asked."""
    found = set()
    async for name in redis.scan_iter():
        assert name.startswith(b"homing:{"), name
        if not immortal or await redis.pttl(name) == -1:
            found.add(name.split(b":")[2].decode())
    return found


async def use_sessions(world: GatewayWorld) -> None:
    """Claims, renewals, moves, ends, lists, and whatever a client that leaves cuts short."""
    headers = {"authorization": f"Bearer {KEY}"}
    for _ in range(2):
        for number in range(6):
            answer = await world.chat(f"s{number}", headers=headers, at=number % 2)
            assert answer.status_code == 200
    leaving = [asyncio.create_task(world.chat(f"left{number}", headers=headers)) for number in range(10)]
    await asyncio.sleep(0.005)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    store = world.gateway.sessions
    assert isinstance(store, RedisStore)
    for number in range(4):
        key = SessionKey(f"{number:032x}")
        binding = await store.claim(key, BackendId("b0"), 1)
        assert binding is not None
        await store.rebind(key, binding.version, BackendId("b1"), 1)
    await store.end(SessionKey("0" * 32))
    await store.flush()
    await store.count_by_backend()
    await store.list_by_backend(BackendId("b1"))


async def give_orders(world: GatewayWorld) -> None:
    """Every order about a backend, its taking back, and a backend that is gone."""
    for path in ("b0/drain", "b0/undrain", "b1/cordon"):
        answer = await world.admin.post(f"/admin/v1/backends/{path}", json={})
        assert answer.is_success, (path, answer.text)
    answer = await world.admin.delete("/admin/v1/backends/b2")
    assert answer.is_success, answer.text
    answer = await world.admin.patch("/admin/v1/backends/b0", json={"weight": 2.0})
    assert answer.is_success, answer.text


async def lose_redis(world: GatewayWorld) -> None:
    """The breaker opens, and the probe that closes it writes."""
    store = world.gateway.sessions
    assert isinstance(store, RedisStore)
    for _ in range(10):
        store.link._note_failure(0)
    assert store.link.is_open(0)
    await world.wait_for(lambda: not store.link.is_open(0), LIMIT_S)


async def test_every_kind_of_key_has_an_end(shared_redis: RedisProcess, redis: Redis) -> None:
    """H07: each feature that writes is used; every documented kind of key is seen, and ends by itself."""
    assert {"s", "b", "names", "probe", "load", "orders", "replicas", "t", "api_keys"} <= KINDS
    await redis.hset("homing:{00}:api_keys", hashlib.sha256(KEY.encode()).hexdigest(), "a")
    limits = {"max_in_flight": 50, "requests_per_minute": 1000, "tokens_per_minute": 1_000_000}
    redis_settings = {"url": shared_redis.url, "budget_ms": 1000, "heartbeat_interval_ms": 50}
    async with GatewayWorld(
        3,
        num_gateways=2,
        sessions={"store": "redis", "redis": redis_settings},
        tenants=[{"name": "a", "limits": limits}],
        authentication={"keys_in_redis": True},
    ) as world:
        await use_sessions(world)
        await give_orders(world)
        await lose_redis(world)
        seen: set[str] = set()
        deadline_s = time.monotonic() + LIMIT_S
        while seen != KINDS:
            assert time.monotonic() < deadline_s, KINDS - seen
            seen |= await kinds_in(redis, immortal=False)
            assert await kinds_in(redis, immortal=True) <= KEPT_FOR_EVER.keys()
            await asyncio.sleep(0.02)
    assert await kinds_in(redis, immortal=True) == KEPT_FOR_EVER.keys()
