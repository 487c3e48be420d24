"""Fixtures of the session store tests: every store that owes the contract, behind one harness."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes.redis_server import RedisProcess
from redis.asyncio import Redis
from sessions.harness import (
    TTL_S,
    Harness,
    ManualClock,
    move_server_time,
    started_redis_store,
    until_live,
)

from gateway.redis_link.settings import RedisSettings
from gateway.sessions.memory import MemoryStore


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    """Each kind of store in turn."""
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "memory":
            yield await stack.enter_async_context(memory_harness())
        else:
            server: RedisProcess = request.getfixturevalue("shared_redis")
            client = await stack.enter_async_context(Redis.from_url(server.url))
            yield await stack.enter_async_context(redis_harness(server.url, client))


@contextlib.asynccontextmanager
async def memory_harness() -> AsyncIterator[Harness]:
    """The memory store on a manual clock."""
    clock = ManualClock()
    store = MemoryStore(ttl_s=TTL_S, max_sessions=50, clock=clock)

    async def settle() -> None:
        """Memory does nothing in the background."""

    async def advance(seconds: float) -> None:
        clock.now_s += seconds

    await store.start()
    yield Harness(store=store, settle=settle, advance=advance)
    await store.close()


@contextlib.asynccontextmanager
async def redis_harness(url: str, client: Redis) -> AsyncIterator[Harness]:
    """The Redis store on a manual clock; the server's time is moved by rewriting what it keeps. The budget is
    one that a busy machine does not exceed by chance."""
    clock = ManualClock()
    settings = RedisSettings(url=url, budget_ms=10_000)
    async with started_redis_store(settings, ttl_s=TTL_S, clock=clock) as store:
        await until_live(store)

        async def advance(seconds: float) -> None:
            clock.now_s += seconds
            await move_server_time(client, seconds)

        yield Harness(store=store, settle=store.flush, advance=advance)
