"""Operators' orders, shared by replicas."""

from __future__ import annotations

import pytest
from fakes.redis_server import RedisProcess
from redis.asyncio import Redis

from gateway.redis_link.settings import RedisSettings
from gateway.replicas.orders import MemoryOrders, Order, RedisOrders
from gateway.sessions.redis_store import RedisStore
from gateway.values import BackendId

A, B = BackendId("a"), BackendId("b")


async def test_alone_there_is_nothing_to_learn() -> None:
    """The memory implementation knows no orders but those its own process keeps itself."""
    orders = MemoryOrders()
    await orders.put(A, Order(wants="cordoned"))
    assert await orders.read() is None


@pytest.mark.redis
async def test_orders_reach_the_other_replica(shared_redis: RedisProcess, redis: Redis) -> None:
    """What one replica puts another reads, until it is taken back; malformed orders are left out."""
    stores = [RedisStore(RedisSettings(url=shared_redis.url, budget_ms=1000), environ={}) for _ in range(2)]
    one, two = (RedisOrders(store.link) for store in stores)
    await one.put(A, Order(wants="draining", deadline_wall_s=5.0))
    await one.put(B, Order(weight=2.0))
    for value in ("", "{", '{"wants":"explode"}', "[]"):
        await redis.hset(stores[0].link.layout.orders, "odd" + value, value)
    assert await two.read() == {A: Order(wants="draining", deadline_wall_s=5.0), B: Order(weight=2.0)}
    await two.put(A, None)
    assert await one.read() == {B: Order(weight=2.0)}
    for store in stores:
        await store.close()


async def test_orders_cannot_be_known_with_redis_away() -> None:
    """With nobody listening, putting raises nothing and reading answers None."""
    store = RedisStore(RedisSettings(url="redis://127.0.0.1:1/0"), environ={})
    orders = RedisOrders(store.link)
    await orders.put(A, Order(wants="cordoned"))
    assert await orders.read() is None
    await store.close()
