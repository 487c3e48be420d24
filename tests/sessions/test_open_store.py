"""Which store and boards the configuration gives."""

from __future__ import annotations

from sessions.harness import ManualClock

from gateway.process.shared_state import open_loads, open_store
from gateway.replicas.loads import MemoryLoads, RedisLoads
from gateway.sessions.memory import MemoryStore
from gateway.sessions.redis_store import RedisStore
from gateway.sessions.settings import SessionsSettings


async def test_memory_by_default() -> None:
    """One process needs nothing else: memory store, nobody to share load with."""
    clock = ManualClock()
    store = open_store(SessionsSettings(), clock=clock, environ={})
    assert isinstance(store, MemoryStore)
    assert isinstance(open_loads(store, clock=clock), MemoryLoads)


async def test_redis_when_asked_for() -> None:
    """The Redis store opens no connection before it is started, and its boards share its link."""
    clock = ManualClock()
    store = open_store(SessionsSettings(store="redis"), clock=clock, environ={})
    assert isinstance(store, RedisStore)
    assert isinstance(open_loads(store, clock=clock), RedisLoads)
    await store.close()
