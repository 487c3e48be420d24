"""Fixtures that several folders of tests share: a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from fakes.redis_server import RedisProcess, redis_server
from redis.asyncio import Redis


@pytest.fixture(scope="session")
def redis_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    """One server for all tests that do not harm it."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def shared_redis(redis_process: RedisProcess) -> RedisProcess:
    """That server, emptied."""
    redis_process.ask("FLUSHALL")
    return redis_process


@pytest.fixture
async def redis(shared_redis: RedisProcess) -> AsyncIterator[Redis]:
    """A plain client to that server."""
    async with Redis.from_url(shared_redis.url) as client:
        yield client
