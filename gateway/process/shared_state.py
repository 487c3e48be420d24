"""The session store, and what else replicas share through it, as the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.replicas.loads import LoadBoard, MemoryLoadBoard, RedisLoadBoard
from gateway.replicas.orders import MemoryOrderBoard, OrderBoard, RedisOrderBoard
from gateway.replicas.presence import MemoryReplicaBoard, RedisReplicaBoard, ReplicaBoard
from gateway.replicas.tenant_use import RedisTenantLedger
from gateway.sessions.memory import MemoryStore
from gateway.sessions.redis_store import RedisStore
from gateway.sessions.settings import SessionsSettings
from gateway.sessions.store import SessionStore
from gateway.tenants.redis_keys import RedisKeyBook


def open_store(
    settings: SessionsSettings, *, clock: Callable[[], float], environ: Mapping[str, str]
) -> SessionStore:
    """Make the store; `start` opens its connections."""
    if settings.store == "redis":
        return RedisStore(settings.redis, ttl_s=settings.ttl_s, clock=clock, environ=environ)
    return MemoryStore(ttl_s=settings.ttl_s, max_sessions=settings.max_sessions, clock=clock)


def open_load_board(store: SessionStore, *, clock: Callable[[], float]) -> LoadBoard:
    """The board that goes with this store; it uses the store's connections and lives as long."""
    if isinstance(store, RedisStore):
        return RedisLoadBoard(store.link, clock=clock)
    return MemoryLoadBoard()


def open_order_board(store: SessionStore) -> OrderBoard:
    """The board of operators' orders; it uses the store's connections and lives as long."""
    if isinstance(store, RedisStore):
        return RedisOrderBoard(store.link)
    return MemoryOrderBoard()


def open_key_book(store: SessionStore, *, ttl_s: float, clock: Callable[[], float]) -> RedisKeyBook:
    """The API keys in Redis; it uses the store's connections. Only for the Redis store."""
    assert isinstance(store, RedisStore), "the configuration asks for it only with this store"
    return RedisKeyBook(store.link, ttl_s=ttl_s, clock=clock)


def open_tenant_ledger(store: SessionStore, *, clock: Callable[[], float]) -> RedisTenantLedger | None:
    """The ledger of tenants' use that replicas share; it uses the store's connections. None: one process."""
    return RedisTenantLedger(store.link, clock=clock) if isinstance(store, RedisStore) else None


def open_replica_board(store: SessionStore) -> ReplicaBoard:
    """The board of replicas; it uses the store's connections and lives as long."""
    if isinstance(store, RedisStore):
        return RedisReplicaBoard(store.link)
    return MemoryReplicaBoard()
