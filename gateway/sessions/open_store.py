"""The session store, and what else replicas share through it, as the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.sessions.key_book import RedisKeyBook
from gateway.sessions.load_board import LoadBoard, MemoryLoadBoard, RedisLoadBoard
from gateway.sessions.memory import MemoryStore
from gateway.sessions.order_board import MemoryOrderBoard, OrderBoard, RedisOrderBoard
from gateway.sessions.redis_store import RedisStore
from gateway.sessions.replica_board import MemoryReplicaBoard, RedisReplicaBoard, ReplicaBoard
from gateway.sessions.settings import SessionsSettings
from gateway.sessions.store import SessionStore
from gateway.sessions.tenant_ledger import RedisTenantLedger


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
