"""Which implementations of the shared state the configuration selects."""

from __future__ import annotations

from sessions.harness import ManualClock

from gateway.config.config import parse_config
from gateway.process.shared_state import open_shared_state
from gateway.replicas.loads import MemoryLoads, RedisLoads
from gateway.replicas.orders import MemoryOrders, RedisOrders
from gateway.replicas.presence import MemoryPresence, RedisPresence
from gateway.sessions.memory import MemoryStore
from gateway.sessions.redis_store import RedisStore


async def test_memory_by_default() -> None:
    """One process keeps everything in memory and has nobody to share with."""
    shared = open_shared_state(parse_config({}), clock=ManualClock(), environ={})
    assert isinstance(shared.sessions, MemoryStore)
    assert isinstance(shared.loads, MemoryLoads)
    assert isinstance(shared.orders, MemoryOrders)
    assert isinstance(shared.presence, MemoryPresence)
    assert shared.tenant_use is None
    assert shared.redis_keys is None


async def test_redis_when_configured() -> None:
    """Every part uses Redis, and no connection is opened before the store is started."""
    config = parse_config({"sessions": {"store": "redis"}})
    shared = open_shared_state(config, clock=ManualClock(), environ={})
    assert isinstance(shared.sessions, RedisStore)
    assert isinstance(shared.loads, RedisLoads)
    assert isinstance(shared.orders, RedisOrders)
    assert isinstance(shared.presence, RedisPresence)
    assert shared.tenant_use is not None
    assert shared.redis_keys is None
    await shared.sessions.close()


async def test_keys_in_redis_only_when_configured() -> None:
    """API keys are looked up in Redis only where the configuration asks for it."""
    config = parse_config({"sessions": {"store": "redis"}, "authentication": {"keys_in_redis": True}})
    shared = open_shared_state(config, clock=ManualClock(), environ={})
    assert shared.redis_keys is not None
    await shared.sessions.close()
