"""The board of operators' orders, in Redis."""

from __future__ import annotations

import pytest
from fakes.redis_server import RedisProcess
from redis.asyncio import Redis

from gateway.redis_link.settings import RedisSettings
from gateway.replicas.order_book import Order, Subject
from gateway.replicas.orders import MemoryOrders, RedisOrders
from gateway.sessions.redis_store import RedisStore
from gateway.values import BackendId

A, B, C = (Subject(BackendId(name), "state") for name in "abc")
DRAIN = Order(ms=5, author="x", renewed_ms=5, wants="draining", deadline_wall_s=5.0)
WEIGHT = {Subject(BackendId("a"), "weight"): Order(ms=9, author="x", weight=2.0)}


def board_at(url: str) -> tuple[RedisStore, RedisOrders]:
    store = RedisStore(RedisSettings(url=url, budget_ms=1000), environ={})
    return store, RedisOrders(store.link)


@pytest.mark.redis
async def test_orders_reach_the_other_replica(shared_redis: RedisProcess, redis: Redis) -> None:
    """What one replica tells another reads, and so does a later start; malformed orders are left out."""
    (store, one), (other_store, two) = board_at(shared_redis.url), board_at(shared_redis.url)
    key = store.link.layout.orders
    await one.exchange({A: DRAIN, **WEIGHT}, {}, lifetime_s=60)
    for value in ("", "{", '{"wants":"explode"}', "[]", '{"ms":-1}', '{"weight":1e9}'):
        await redis.hset(key, "odd" + value, value)
    assert await two.exchange({}, {}, lifetime_s=60) == {A: DRAIN, **WEIGHT}
    assert 0 < await redis.pttl(key) <= 60_000
    await store.close()
    await other_store.close()


@pytest.mark.redis
async def test_redis_and_memory_merge_alike(shared_redis: RedisProcess, redis: Redis) -> None:
    """Only a later order replaces one, also if an earlier one is told late; what is malformed is replaced.
    Only what is not later than the forgotten order is removed."""
    store, board = board_at(shared_redis.url)
    memory = MemoryOrders()
    later = Order(ms=6, author="a")
    steps: list[tuple[dict[Subject, Order], dict[Subject, Order]]] = [
        ({A: DRAIN, B: DRAIN}, {}),
        ({A: Order(ms=5, author="w", renewed_ms=9), B: later}, {}),
        ({A: Order(ms=5, author="x", renewed_ms=4), B: DRAIN}, {}),
        ({A: Order(ms=5, author="x", renewed_ms=2**52), C: DRAIN}, {}),
        ({}, {A: DRAIN, B: later, C: Order(ms=10, author="a")}),
        ({B: Order(ms=2**52, author="b")}, {A: Order(ms=5, author="x", renewed_ms=2**52)}),
        ({B: Order(ms=2**52 - 1, author="b")}, {}),
    ]
    await redis.hset(store.link.layout.orders, "c", "{malformed")
    for told, forgotten in steps:
        expected = await memory.exchange(told, forgotten, lifetime_s=60)
        assert await board.exchange(told, forgotten, lifetime_s=60) == expected
    await store.close()


@pytest.mark.redis
async def test_a_full_redis_is_read_and_shows_what_it_did_not_take(
    shared_redis: RedisProcess, redis: Redis
) -> None:
    """Beyond maxmemory: nothing is stored, and what the others told before is still read."""
    store, board = board_at(shared_redis.url)
    await board.exchange({A: DRAIN}, {}, lifetime_s=60)
    await redis.config_set("maxmemory", "1")
    try:
        assert await board.exchange({B: DRAIN}, {}, lifetime_s=60) == {A: DRAIN}
    finally:
        await redis.config_set("maxmemory", "0")
    await store.close()


async def test_orders_cannot_be_known_with_redis_away() -> None:
    """With nobody listening, the exchange raises nothing and answers None."""
    store, board = board_at("redis://127.0.0.1:1/0")
    assert await board.exchange({A: DRAIN}, {}, lifetime_s=60) is None
    await store.close()
