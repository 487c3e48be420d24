"""What counts against Redis and what is our own: a late loop, a queue for places, one budget for all."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from fakes.redis_server import RedisProcess, redis_server
from fakes.tcp_proxy import tcp_proxy
from sessions.harness import key, proxied, started_redis_store, timed_claim, until, until_live

from gateway.redis_link.breaker import BreakerState
from gateway.redis_link.link import NUM_WARM_CONNECTIONS
from gateway.redis_link.settings import RedisSettings
from gateway.values import BackendId, Binding, SessionKey

pytestmark = pytest.mark.redis

A, B = BackendId("a"), BackendId("b")
KEY = SessionKey("00112233445566778899aabbccddeeff")
WELL_BELOW_SOCKET_TIMEOUT_S = 0.7
TURN_S = 0.025  # half a budget: a call to Redis takes several turns of the loop


async def hold_the_loop(turn_s: float) -> None:
    """Make each turn of the loop take this long, until cancelled."""
    while True:
        time.sleep(turn_s)
        await asyncio.sleep(0)


async def test_one_budget_for_all_calls_of_a_request(shared_redis: RedisProcess) -> None:
    """Three calls that share a budget wait one budget together, not one each."""
    async with tcp_proxy("127.0.0.1", shared_redis.port) as proxy:
        settings = proxied(proxy.port, budget_ms=300, breaker_failures=100, socket_timeout_ms=3000)
        async with started_redis_store(settings) as store:
            await until_live(store)
            proxy.is_silent = True
            started_s = time.perf_counter()
            budget = store.budget()
            assert await store.get(KEY, budget) is None
            assert await store.claim(KEY, A, 1, 0, budget) is None
            assert await store.rebind(KEY, 1, B, 1, 0, budget) is None
            assert 0.25 < time.perf_counter() - started_s < 0.75
            assert store.stats().errors["budget_spent"] == 2


async def test_more_requests_than_places(shared_redis: RedisProcess) -> None:
    """A thousand claims at once through ten places on a slow way need twenty times the budget of one: our own
    queue is no fault of a Redis that answers, and all are bound."""
    async with (
        tcp_proxy("127.0.0.1", shared_redis.port) as proxy,
        started_redis_store(
            proxied(proxy.port, pool_size=10, budget_ms=100, socket_timeout_ms=20_000)
        ) as store,
    ):
        await until_live(store)
        proxy.delay_s = 0.02
        claims = (store.claim(key(number), A, 1) for number in range(1000))
        assert all(await asyncio.gather(*claims))
        assert store.stats().errors == {}
        assert store.stats().breaker is BreakerState.CLOSED
        assert proxy.num_open <= 10 + NUM_WARM_CONNECTIONS + 1


async def test_queue_that_is_too_long_for_redis(shared_redis: RedisProcess) -> None:
    """Who would wait longer than the socket timeout for one of our places goes on without, and that is no
    evidence against Redis."""
    async with (
        tcp_proxy("127.0.0.1", shared_redis.port) as proxy,
        started_redis_store(proxied(proxy.port, pool_size=2, budget_ms=200, socket_timeout_ms=400)) as store,
    ):
        await until_live(store)
        proxy.delay_s = 0.02
        outcomes = await asyncio.gather(*(store.claim(key(number), A, 1) for number in range(500)))
        assert any(outcomes)
        assert store.stats().errors == {"busy": outcomes.count(None)}
        assert store.stats().breaker is BreakerState.CLOSED


async def test_queue_behind_a_redis_that_fails_is_told(shared_redis: RedisProcess) -> None:
    """Those that wait for a place go on without Redis about when those do that hold one."""
    async with (
        tcp_proxy("127.0.0.1", shared_redis.port) as proxy,
        started_redis_store(proxied(proxy.port, pool_size=2, socket_timeout_ms=5000)) as store,
    ):
        await until_live(store)
        proxy.is_silent = True
        waits = await asyncio.gather(*(timed_claim(store, number) for number in range(50)))
        assert max(waits) < WELL_BELOW_SOCKET_TIMEOUT_S
        proxy.is_silent = False


async def test_stall_of_our_own_loop_is_not_blamed_on_redis(shared_redis: RedisProcess) -> None:
    """Something holds the event loop for longer than the budget, and than the socket timeout, while answers
    lie in the socket: they are still taken, and the breaker stays closed."""
    async with started_redis_store(RedisSettings(url=shared_redis.url)) as store:
        await until_live(store)
        await store.claim(KEY, A, 1)
        for held_s in (0.15, 1.5):
            claims = [asyncio.create_task(store.claim(key(number), A, 1)) for number in range(5)]
            for _ in range(6):
                await asyncio.sleep(0)  # until the commands are on their way
            time.sleep(held_s)
            assert all(await asyncio.gather(*claims))
        assert store.stats().errors == {}
        assert store.stats().breaker is BreakerState.CLOSED


async def test_a_loop_that_is_late_all_the_time_binds_every_session(shared_redis: RedisProcess) -> None:
    """Each turn of the loop takes as long as half a budget, and a call takes several turns (P01): sixty-four
    sessions at a time are found and bound, with more of them than places."""

    async def first_turn(number: int) -> Binding | None:
        budget = store.budget()
        assert await store.get(key(number), budget) is None
        return await store.claim(key(number), A, 1, 0, budget)

    async with started_redis_store(RedisSettings(url=shared_redis.url)) as store:
        await until_live(store)
        holder = asyncio.create_task(hold_the_loop(TURN_S))
        assert all(await asyncio.gather(*map(first_turn, range(64))))
        holder.cancel()
        assert store.stats().errors == {}
        assert store.stats().breaker is BreakerState.CLOSED


async def test_late_loop_still_notices_a_frozen_server(tmp_path: Path) -> None:
    """What a late loop is forgiven is bounded: a server that stops is noticed within the ticks of a budget,
    long before the socket timeout, and one that goes on is used again."""
    with redis_server(tmp_path) as server:
        async with started_redis_store(proxied(server.port, socket_timeout_ms=5000)) as store:
            await until_live(store)
            holder = asyncio.create_task(hold_the_loop(TURN_S))
            server.pause()
            try:
                waits = await asyncio.gather(*(timed_claim(store, number) for number in range(30)))
                assert max(waits) < 2.0
                assert store.stats().breaker is not BreakerState.CLOSED
            finally:
                server.resume()
            await until(lambda: store.stats().breaker is BreakerState.CLOSED, "the store is used again")
            holder.cancel()
