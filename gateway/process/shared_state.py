"""The session store, and what else replicas share through it, as the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.replicas.loads import MemoryLoads, RedisLoads, SharedLoads
from gateway.replicas.orders import MemoryOrders, RedisOrders, SharedOrders
from gateway.replicas.presence import MemoryPresence, RedisPresence, SharedPresence
from gateway.replicas.tenant_use import RedisTenantUse
from gateway.sessions.memory import MemoryStore
from gateway.sessions.redis_store import RedisStore
from gateway.sessions.settings import SessionsSettings
from gateway.sessions.store import SessionStore
from gateway.tenants.redis_keys import RedisKeys


def open_store(
    settings: SessionsSettings, *, clock: Callable[[], float], environ: Mapping[str, str]
) -> SessionStore:
    """Make the store; `start` opens its connections."""
    if settings.store == "redis":
        return RedisStore(settings.redis, ttl_s=settings.ttl_s, clock=clock, environ=environ)
    return MemoryStore(ttl_s=settings.ttl_s, max_sessions=settings.max_sessions, clock=clock)


def open_loads(store: SessionStore, *, clock: Callable[[], float]) -> SharedLoads:
    """The board that goes with this store; it uses the store's connections and lives as long."""
    if isinstance(store, RedisStore):
        return RedisLoads(store.link, clock=clock)
    return MemoryLoads()


def open_orders(store: SessionStore) -> SharedOrders:
    """The board of operators' orders; it uses the store's connections and lives as long."""
    if isinstance(store, RedisStore):
        return RedisOrders(store.link)
    return MemoryOrders()


def open_redis_keys(store: SessionStore, *, ttl_s: float, clock: Callable[[], float]) -> RedisKeys:
    """The API keys in Redis; it uses the store's connections. Only for the Redis store."""
    assert isinstance(store, RedisStore), "the configuration asks for it only with this store"
    return RedisKeys(store.link, ttl_s=ttl_s, clock=clock)


def open_tenant_use(store: SessionStore, *, clock: Callable[[], float]) -> RedisTenantUse | None:
    """The ledger of tenants' use that replicas share; it uses the store's connections. None: one process."""
    return RedisTenantUse(store.link, clock=clock) if isinstance(store, RedisStore) else None


def open_presence(store: SessionStore) -> SharedPresence:
    """The board of replicas; it uses the store's connections and lives as long."""
    if isinstance(store, RedisStore):
        return RedisPresence(store.link)
    return MemoryPresence()
