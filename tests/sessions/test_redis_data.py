"""What lies in Redis is data to be checked, and what is written there can be read again and has an end."""

from __future__ import annotations

import asyncio
import random

import pytest
from fakes.redis_server import RedisProcess
from redis.asyncio import Redis
from sessions.harness import ManualClock, started_redis_store, until_live

from gateway.redis_link.settings import RedisSettings
from gateway.values import BackendId, SessionKey

pytestmark = pytest.mark.redis

A, B = BackendId("a"), BackendId("b")
KEY = SessionKey("00112233445566778899aabbccddeeff")


def key(number: int) -> SessionKey:
    return SessionKey(f"{number:032x}")


@pytest.mark.parametrize(
    "value",
    ["", "x", "1 2 3", "1 1 1 1 1 http://10.0.0.1/", "\x00" * 50, "9" * 1000, '{"a":1}', "2 1 1 1 1 a"],
)
async def test_odd_value_counts_as_absent(shared_redis: RedisProcess, redis: Redis, value: str) -> None:
    """What is no binding is no home; it is counted, and a claim replaces it."""
    async with started_redis_store(RedisSettings(url=shared_redis.url)) as store:
        await redis.set("homing:{00}:s:" + KEY, value, ex=100)
        assert await store.get(KEY) is None
        assert store.stats().errors["odd_value"] == 1
        assert await store.rebind(KEY, 1, B, 1) is None
        assert (await store.claim(KEY, A, 1)).backend_id == A  # type: ignore[union-attr]  # None fails


async def test_impossible_numbers_do_not_spoil_a_batch(shared_redis: RedisProcess) -> None:
    """A turn noted with negative or absurd numbers is clamped; the others of its batch are sent too."""
    async with started_redis_store(RedisSettings(url=shared_redis.url, budget_ms=1000)) as store:
        bindings = [await store.claim(key(number), A, 1) for number in range(3)]
        for number, (tokens, turns) in enumerate([(-5, -1), (10**30, 10**30), (7, 2)]):
            store.renew(key(number), bindings[number], context_tokens=tokens, num_turns=turns)  # type: ignore[arg-type]  # None fails
        await store.flush()
        assert store.stats().errors == {}
        assert store.stats().num_pending_renewals == 0
        async with started_redis_store(RedisSettings(url=shared_redis.url, budget_ms=1000)) as fresh:
            found = [await fresh.get(key(number)) for number in range(3)]
            sizes = [(it.context_tokens, it.num_turns) for it in found if it is not None]
            assert sizes == [(0, 0), (10**12 - 1, 10**9 - 1), (7, 2)]


async def test_claims_that_could_not_be_read_back_are_refused(
    shared_redis: RedisProcess, redis: Redis
) -> None:
    """A backend id that is no plain name, or a negative number, is not written."""
    async with started_redis_store(RedisSettings(url=shared_redis.url, budget_ms=1000)) as store:
        assert await store.claim(KEY, BackendId("http://10.0.0.1/"), 1) is None
        assert await store.claim(KEY, A, -1) is None
        assert await store.rebind(KEY, 1, BackendId("a b"), 1) is None
        assert await redis.dbsize() == 0


async def test_other_type_and_immortal_value_count_as_absent(
    shared_redis: RedisProcess, redis: Redis
) -> None:
    """A list where a binding should be, and a binding without an end, are both replaced by a claim."""
    async with started_redis_store(RedisSettings(url=shared_redis.url)) as store:
        await redis.rpush("homing:{00}:s:" + KEY, "x")
        await redis.set("homing:{00}:s:" + key(1), "1 5 1 1 1 old")
        for session in (KEY, key(1)):
            assert await store.get(session) is None
            assert (await store.claim(session, A, 1)).backend_id == A  # type: ignore[union-attr]  # None fails
            assert await redis.ttl("homing:{00}:s:" + session) > 0


async def test_no_session_without_an_end(shared_redis: RedisProcess, redis: Redis) -> None:
    """Whatever callers do and wherever they leave, every key in Redis has a time to live."""
    chance = random.Random(3)
    async with started_redis_store(RedisSettings(url=shared_redis.url)) as store:

        async def turn(number: int) -> None:
            binding = await store.claim(key(number % 20), BackendId(f"b{number % 3}"), 1)
            assert binding is not None
            store.renew(key(number % 20), binding, context_tokens=number, num_turns=1)
            await store.rebind(key(number % 20), binding.version, B, 1)

        tasks = [asyncio.create_task(turn(number)) for number in range(200)]
        for task in tasks:
            if chance.random() < 0.5:
                await asyncio.sleep(0)
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await store.flush()
        keys = [name async for name in redis.scan_iter()]
        assert keys
        for name in keys:
            assert await redis.pttl(name) > 0, name


async def test_clock_jumps_do_not_end_sessions(shared_redis: RedisProcess, redis: Redis) -> None:
    """The wall clock of this machine may be set to any time: homes stay, and only what is shown changes."""
    wall, clock = ManualClock(1e9), ManualClock(50.0)
    settings = RedisSettings(url=shared_redis.url, heartbeat_interval_ms=20)
    async with started_redis_store(settings, clock=clock, wall_clock=wall) as store:
        await until_live(store)
        claimed = await store.claim(KEY, A, 1)
        assert claimed is not None
        assert abs(claimed.expires_at_s - (1e9 + 3600)) < 1
        for now_s in (2e9, 0.0, 1e9):
            wall.now_s = now_s
            assert (await store.get(KEY)) is not None
        assert 3500 < await redis.ttl("homing:{00}:s:" + KEY) <= 3600
