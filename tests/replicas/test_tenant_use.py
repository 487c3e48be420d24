"""Tenants' limits shared through a real Redis: the same rule as in one process, over several replicas."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from fakes.redis_server import RedisProcess
from redis.asyncio import Redis
from sessions.harness import ManualClock, until

from gateway.limits.allowance import Allowance, TenantUse
from gateway.limits.settings import TenantLimits
from gateway.redis_link.key_layout import KeyLayout
from gateway.redis_link.link import RedisLink
from gateway.redis_link.settings import RedisSettings
from gateway.replicas.tenant_use import LEASE_S, RedisTenantUse

pytestmark = pytest.mark.redis


@pytest.fixture
async def link(shared_redis: RedisProcess) -> AsyncIterator[RedisLink]:
    link = RedisLink(RedisSettings(url=shared_redis.url, budget_ms=2000), clock=lambda: 0.0, environ={})
    yield link
    await link.close()


@contextlib.asynccontextmanager
async def started(
    link: RedisLink, in_flight: dict[str, int], clock: ManualClock | None = None
) -> AsyncIterator[RedisTenantUse]:
    use = RedisTenantUse(link, clock=clock or ManualClock())
    use.start(lambda tenant: in_flight.get(tenant, 0))
    yield use
    await use.close()


async def draw(use: RedisTenantUse, limits: TenantLimits, tokens: int = 0, in_flight: int = 1) -> Allowance:
    allowance = await use.draw("a", limits, tokens, in_flight, None)
    assert allowance is not None
    return allowance


async def use_key(client: Redis) -> str:
    (key,) = [key async for key in client.scan_iter(match="*:t:*")]
    return key.decode()


async def age(client: Redis, seconds: float) -> None:
    """Make the one stored use older: a server's clock cannot be set."""
    key = await use_key(client)
    await client.hincrby(key, "a", -round(seconds * 1e6))
    for name, value in (await client.hgetall(key)).items():
        assert isinstance(name, bytes)
        assert isinstance(value, bytes)
        if name.startswith(b"n:"):
            sequence, count, void_ms = value.split()
            await client.hset(
                key, name, b"%b %b %d" % (sequence, count, int(void_ms) - round(seconds * 1000))
            )


@pytest.mark.parametrize("seed", range(3))
async def test_the_script_and_the_rule_in_one_process_agree(link: RedisLink, redis: Redis, seed: int) -> None:
    """Any sequence of charges, corrections and pauses: the same grants, the same levels."""
    chance = random.Random(seed)
    limits = TenantLimits(max_in_flight=3, requests_per_minute=6, tokens_per_minute=100)
    local, now_s = TenantUse(0.0), 0.0
    async with started(link, {}) as use:
        for _ in range(40):
            tokens, in_flight = chance.randrange(150), chance.randrange(1, 5)
            shared = await draw(use, limits, tokens, in_flight)
            alone = local.draw(limits, tokens, in_flight - 1, now_s)
            assert shared.refused_for == alone.refused_for
            # real time passes between the calls of the script, and refills a little
            assert shared.requests_left == pytest.approx(alone.requests_left, abs=0.5)
            assert shared.tokens_left == pytest.approx(alone.tokens_left, abs=3.0)
            local.adopt(shared, now_s)
            if chance.random() < 0.5:
                pause_s = chance.uniform(1, 30)
                now_s += pause_s
                await age(redis, pause_s)


async def test_replicas_share_one_bucket(link: RedisLink) -> None:
    """Two replicas together grant what one limit allows, and tell the same levels."""
    limits = TenantLimits(requests_per_minute=4)
    async with started(link, {}) as one, started(link, {}) as two:
        answers = [await draw(use, limits) for use in (one, two, one, two, one)]
    assert [answer.refused_for for answer in answers] == [None] * 4 + ["tenant_requests"]
    assert answers[-1].retry_after_s == pytest.approx(15.0, abs=1.0)
    assert [int(answer.requests_left + 0.01) for answer in answers] == [3, 2, 1, 0, 0]


async def test_real_use_is_settled_for_all(link: RedisLink) -> None:
    """What one replica learns at the end of an answer counts on the other; many words become few."""
    limits = TenantLimits(tokens_per_minute=100)
    async with started(link, {}) as one, started(link, {}) as two:
        await draw(one, limits, 10)
        one.settle("a", limits, 30)
        one.settle("a", limits, 20)
        await until(lambda: not one._updates, "the settlement is sent")
        assert (await draw(two, limits, 0)).tokens_left == pytest.approx(40.0, abs=2.0)


async def test_requests_in_flight_add_up_over_replicas(link: RedisLink) -> None:
    """A place taken on one replica is missing on the other until the request ends."""
    limits = TenantLimits(max_in_flight=2)
    in_flight = {"a": 2}
    async with started(link, in_flight) as one, started(link, {}) as two:
        await draw(one, limits, in_flight=1)
        await draw(one, limits, in_flight=2)
        assert (await draw(two, limits)).refused_for == "tenant_in_flight"
        in_flight["a"] = 1
        one.settle("a", limits, 0)
        await until(lambda: not one._updates["a"].is_pending, "the end is sent")
        assert (await draw(two, limits)).refused_for is None


async def test_a_dead_replica_gives_its_places_back_and_a_living_one_keeps_them(
    link: RedisLink, redis: Redis
) -> None:
    """The lease runs out where nobody announces; one that lasts longer goes on counting."""
    limits = TenantLimits(max_in_flight=1)
    clock = ManualClock()
    async with started(link, {"a": 1}, clock) as living, started(link, {}) as two:
        await draw(living, limits)
        await age(redis, LEASE_S * 0.9)
        clock.now_s += LEASE_S * 0.9
        await living._send_all()
        await age(redis, LEASE_S * 0.9)
        assert (await draw(two, limits)).refused_for == "tenant_in_flight"
        await age(redis, LEASE_S)
        assert (await draw(two, limits)).refused_for is None


async def test_an_older_word_does_not_replace_a_newer_one(link: RedisLink, redis: Redis) -> None:
    """Commands may overtake each other on their connections."""
    limits = TenantLimits(max_in_flight=5)
    async with started(link, {}) as use:
        await draw(use, limits, in_flight=3)
        use._sequence = 0
        await draw(use, limits, in_flight=1)
        row = await redis.hgetall(await use_key(redis))
        (value,) = [
            value for name, value in row.items() if isinstance(name, bytes) and name.startswith(b"n:")
        ]
        assert value.split()[:2] == [b"1", b"3"]


@pytest.mark.parametrize("value", [b"", b"x", b"nan", b"inf", b"1e400", b"\xff"])
async def test_nonsense_in_redis_is_a_full_bucket(link: RedisLink, redis: Redis, value: bytes) -> None:
    """What lies in Redis is data to be checked: no error, and no more than a whole bucket."""
    limits = TenantLimits(max_in_flight=5, requests_per_minute=10, tokens_per_minute=10)
    async with started(link, {}) as use:
        await draw(use, limits)
        key = await use_key(redis)
        for field in ("r", "t", "a", "n:other"):
            await redis.hset(key, field, value)
        answer = await draw(use, limits, 1)
        assert answer.refused_for is None
        assert answer.requests_left <= 9
        assert answer.tokens_left <= 9


async def test_a_key_of_another_type_or_no_redis_means_no_answer(
    shared_redis: RedisProcess, link: RedisLink, redis: Redis
) -> None:
    """The caller then decides alone; nothing is raised."""
    limits = TenantLimits(requests_per_minute=10)
    async with started(link, {}) as use:
        await draw(use, limits)
        key = await use_key(redis)
        await redis.delete(key)
        await redis.set(key, "text")
        assert await use.draw("a", limits, 0, 1, None) is None
    nowhere = RedisLink(
        RedisSettings(url="redis://127.0.0.1:1/0", budget_ms=2000), clock=lambda: 0.0, environ={}
    )
    async with started(nowhere, {}) as use:
        assert await use.draw("a", limits, 0, 1, None) is None
        use.settle("a", limits, 5)
    await nowhere.close()


async def test_uses_hold_no_names_and_go_by_themselves(link: RedisLink, redis: Redis) -> None:
    """A tenant's name may be a client's choice: only its hash is stored, with an end."""
    limits = TenantLimits(requests_per_minute=60, tokens_per_minute=60)
    async with started(link, {}) as use:
        await use.draw("a:{b} *\r\n", limits, 30, 1, None)
    key = await use_key(redis)
    assert key.startswith(KeyLayout("homing", 1).tenant(0, ""))
    assert set(key.rpartition(":")[2]) <= set("0123456789abcdef")
    assert LEASE_S * 1000 <= await redis.pttl(key) <= 70_000
