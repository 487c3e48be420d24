"""API keys in a real Redis."""

from __future__ import annotations

import hashlib

import pytest
from fakes.redis_server import RedisProcess
from redis.asyncio import Redis

from gateway.errors import CannotAuthenticate
from gateway.redis_link.link import RedisLink
from gateway.redis_link.settings import RedisSettings
from gateway.tenants.redis_keys import RedisKeys

pytestmark = pytest.mark.redis
KEY = "key-of-tenant-a-0001"
DIGEST = hashlib.sha256(KEY.encode()).digest()
API_KEYS = "homing:{00}:api_keys"


async def test_a_key_is_found_by_its_digest_until_it_is_revoked(
    shared_redis: RedisProcess, redis: Redis
) -> None:
    """As an operator adds it with HSET and takes it away with HDEL."""
    link = RedisLink(RedisSettings(url=shared_redis.url, budget_ms=2000), environ={})
    keys = RedisKeys(link, ttl_s=30.0, clock=link._clock)
    assert await keys.prove(KEY.encode(), DIGEST) is None
    await redis.hset(API_KEYS, DIGEST.hex(), "team-a")
    assert await keys.prove(KEY.encode(), DIGEST) == ("team-a", 30.0)
    await redis.hdel(API_KEYS, DIGEST.hex())
    assert await keys.prove(KEY.encode(), DIGEST) is None
    await link.close()


async def test_without_an_answer_nothing_is_known(shared_redis: RedisProcess, redis: Redis) -> None:
    """Redis away, or something else under the key: not the client's fault, so not a 401."""
    for url, is_odd in (("redis://127.0.0.1:1/0", False), (shared_redis.url, True)):
        if is_odd:
            await redis.set(API_KEYS, "text")
        link = RedisLink(RedisSettings(url=url, budget_ms=2000), environ={})
        with pytest.raises(CannotAuthenticate):
            await RedisKeys(link, ttl_s=30.0, clock=link._clock).prove(KEY.encode(), DIGEST)
        await link.close()
