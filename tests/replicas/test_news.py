"""Replicas telling each other what they have sent: over a real Redis, whatever is in the field of another."""

from __future__ import annotations

import msgspec
import pytest
from fakes.redis_server import RedisProcess
from fakes.tcp_proxy import tcp_proxy
from redis.asyncio import Redis

from gateway.redis_link.link import RedisLink
from gateway.redis_link.settings import RedisSettings
from gateway.replicas.news import NoNews, RedisNews
from gateway.routing.news import News, Placed

NEWS = "homing:{00}:news"


def told(number: int) -> News:
    return News(("a",), (Placed(0, 0, ((number, 100),), 0.5),))


async def test_alone_there_is_nobody_to_tell() -> None:
    """The memory implementation keeps nothing."""
    assert await NoNews().exchange(told(1)) == []


@pytest.mark.redis
async def test_each_round_reaches_each_other_replica_once(shared_redis: RedisProcess, redis: Redis) -> None:
    """Also to one that comes a round late; nobody hears of itself."""
    link = RedisLink(RedisSettings(url=shared_redis.url, budget_ms=1000), environ={})
    one, two, late = (RedisNews(link) for _ in range(3))
    assert await one.exchange(told(1)) == []
    assert await two.exchange(told(2)) == [told(1)]
    assert await one.exchange(told(3)) == [told(2)]
    assert await one.exchange(told(4)) == []
    assert await two.exchange(told(5)) == [told(3), told(4)]
    found = await late.exchange(told(6))
    assert sorted(found, key=lambda news: news.placed[0].lines) == [
        told(number) for number in (1, 2, 3, 4, 5)
    ]
    assert 0 < await redis.pttl(NEWS) <= 3000
    await link.close()


@pytest.mark.redis
async def test_what_is_no_news_is_counted_and_skipped(shared_redis: RedisProcess, redis: Redis) -> None:
    """Malformed fields of others neither raise nor hide good ones."""
    link = RedisLink(RedisSettings(url=shared_redis.url, budget_ms=1000), environ={})
    one, other = RedisNews(link), RedisNews(link)
    await other.exchange(told(1))
    value = (await redis.hvals(NEWS))[0]
    assert isinstance(value, bytes)
    written_ms = value.split(b" ")[0]
    odd = [b"", b"{", b"[]", b'["r",1]', b'["r",[[1,[["a"],[[0,0,0,[],"x"]]]]]]', b"\xff", b"[" * 5_000]
    for number, payload in enumerate(odd):
        await redis.hset(NEWS, f"odd{number}", written_ms + b" " + payload)
    assert await one.exchange(News()) == [told(1)]
    assert link.errors["odd_value"] == len(odd)
    await link.close()


@pytest.mark.redis
async def test_redis_away(shared_redis: RedisProcess) -> None:
    """Nothing is told and nothing raised."""
    async with tcp_proxy("127.0.0.1", shared_redis.port) as proxy:
        proxy.garbage = b"?"
        link = RedisLink(RedisSettings(url=f"redis://127.0.0.1:{proxy.port}/0"), environ={})
        assert await RedisNews(link).exchange(told(1)) == []
        await link.close()


def test_a_round_is_small() -> None:
    """The most that is told in one round stays far below a megabyte."""
    lines = tuple((2**64 - 1 - number, 100_000) for number in range(10))
    placed = tuple(Placed(number % 64, 2**64 - 1, lines, 1.234567) for number in range(2_000))
    news = News(tuple(f"backend-{number}" for number in range(64)), placed)
    assert len(msgspec.json.encode(news)) < 1_000_000
