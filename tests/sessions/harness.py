"""What the contract suite needs of a store under test: the store, and a way to let time pass."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis

from gateway.redis_link.settings import RedisSettings
from gateway.sessions.redis_store import RedisStore
from gateway.sessions.store import SessionStore
from gateway.values import BackendId, SessionKey

TTL_S = 100.0


class ManualClock:
    """A clock that moves only when told."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """A started store with `ttl_s` = TTL_S and room for at least 50 sessions.

    `settle` waits until all that the store does in the background is done; `advance` lets seconds pass,
    for the store and for its server.
    """

    store: SessionStore
    settle: Callable[[], Awaitable[None]]
    advance: Callable[[float], Awaitable[None]]


@contextlib.asynccontextmanager
async def started_redis_store(settings: RedisSettings, **options: Any) -> AsyncIterator[RedisStore]:
    """A Redis store, started and closed again."""
    store = RedisStore(settings, environ={}, **options)
    await store.start()
    try:
        yield store
    finally:
        await store.close()


async def until(condition: Callable[[], bool], what: str, limit_s: float = 20.0) -> None:
    """Wait for something that another process or task brings about."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {limit_s} s: {what}"
        await asyncio.sleep(0.005)


async def until_live(store: RedisStore) -> None:
    """Wait until the store hears what others do."""
    await until(lambda: store.stats().is_invalidation_live, "the invalidation channel is live")


async def move_server_time(client: Redis, seconds: float) -> None:
    """Make everything that lives in Redis `seconds` older: a server's clock cannot be set."""
    async for key in client.scan_iter(match="*:s:*"):
        rest_ms = await client.pttl(key) - round(seconds * 1000)
        # What a request does takes a millisecond of real time too: at the very end counts as over.
        await client.pexpire(key, max(rest_ms, 0))
    async for key in client.scan_iter(match="*:b:*"):
        for member in await client.zrange(key, 0, -1):
            assert isinstance(member, bytes)
            await client.zincrby(key, -round(seconds * 1000), member)


def key(number: int) -> SessionKey:
    """A session's key of its own."""
    return SessionKey(f"{number:032x}")


def proxied(port: int, **options: float) -> RedisSettings:
    """Settings for a Redis at this port, with beats and probes ten times as fast as by default."""
    return msgspec.convert(
        {"url": f"redis://127.0.0.1:{port}/0", "heartbeat_interval_ms": 100, **options}, RedisSettings
    )


async def timed_claim(store: RedisStore, number: int) -> float:
    """Claim a session of its own; how long that took."""
    started_s = time.perf_counter()
    await store.claim(key(number), BackendId("a"), 1)
    return time.perf_counter() - started_s
