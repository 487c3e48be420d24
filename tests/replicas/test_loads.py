"""Replicas telling each other their load."""

from __future__ import annotations

import pytest
from fakes.redis_server import RedisProcess
from fakes.tcp_proxy import tcp_proxy
from redis.asyncio import Redis
from sessions.harness import ManualClock

from gateway.redis_link.link import RedisLink
from gateway.redis_link.settings import RedisSettings
from gateway.replicas.loads import LIFETIME_S, MemoryLoads, RedisLoads
from gateway.values import BackendId

A, B = BackendId("a"), BackendId("b")
LOADS = "homing:{00}:load"


async def test_alone_there_are_no_others() -> None:
    """The memory implementation has nobody else to count."""
    loads = MemoryLoads()
    await loads.publish({A: (1.0, 2)})
    assert loads.others() == {}


@pytest.mark.redis
async def test_each_replica_sees_the_sum_of_the_others(shared_redis: RedisProcess) -> None:
    """Of three replicas each sees what the two others wrote, added up, and not its own."""
    link = RedisLink(RedisSettings(url=shared_redis.url, budget_ms=1000), environ={})
    replicas = [RedisLoads(link) for _ in range(3)]
    for loads in replicas:
        await loads.publish({A: (0.5, 1), B: (2.0, 3)})
    await replicas[0].publish({A: (4.0, 7)})
    await replicas[1].publish({})
    assert replicas[0].others() == {A: (1.0, 2), B: (4.0, 6)}
    assert replicas[1].others() == {A: (4.5, 8), B: (2.0, 3)}
    await link.close()


@pytest.mark.redis
async def test_old_load_is_forgotten(shared_redis: RedisProcess, redis: Redis) -> None:
    """What was read is void after its lifetime; a replica that stopped writing is removed."""
    clock = ManualClock()
    link = RedisLink(RedisSettings(url=shared_redis.url, budget_ms=1000), clock=clock, environ={})
    loads, gone = RedisLoads(link, clock=clock), RedisLoads(link, clock=clock)
    await gone.publish({A: (1.0, 1)})
    await loads.publish({})
    assert loads.others() == {A: (1.0, 1)}
    clock.now_s += LIFETIME_S
    assert loads.others() == {}
    for name, value in (await redis.hgetall(LOADS)).items():
        assert isinstance(value, bytes)
        written_ms, payload = value.split(b" ", 1)
        await redis.hset(LOADS, name, b"%d %s" % (int(written_ms) - 3000, payload))
    await loads.publish({})
    assert loads.others() == {}
    assert await redis.hlen(LOADS) == 1
    assert 0 < await redis.pttl(LOADS) <= 3000
    await link.close()


@pytest.mark.redis
async def test_malformed_loads_count_as_idle(shared_redis: RedisProcess, redis: Redis) -> None:
    """Malformed fields and absurd numbers of others neither raise nor count."""
    link = RedisLink(RedisSettings(url=shared_redis.url, budget_ms=1000), environ={})
    loads, other = RedisLoads(link), RedisLoads(link)
    await other.publish({A: (1.0, 1)})
    value = (await redis.hvals(LOADS))[0]
    assert isinstance(value, bytes)
    written_ms = value.split(b" ")[0]
    for number, payload in enumerate(
        [b"", b"{", b'[["a"]]', b'[["a","x",1]]', b'[["a",-1.0,1]]', b'[["a",1e300,1]]', b"\xff", b"null"]
    ):
        await redis.hset(LOADS, f"odd{number}", written_ms + b" " + payload)
    await redis.hset(LOADS, "no-time", "hello")
    await loads.publish({})
    assert loads.others() == {A: (1.0, 1)}
    await link.close()


@pytest.mark.redis
async def test_redis_away(shared_redis: RedisProcess) -> None:
    """With Redis away publishing raises nothing and the others count as idle."""
    async with tcp_proxy("127.0.0.1", shared_redis.port) as proxy:
        proxy.garbage = b"?"
        link = RedisLink(RedisSettings(url=f"redis://127.0.0.1:{proxy.port}/0"), environ={})
        loads = RedisLoads(link)
        await loads.publish({A: (1.0, 1)})
        assert loads.others() == {}
        await link.close()
