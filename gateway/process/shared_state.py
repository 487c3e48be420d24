"""What replicas share: in this process's memory, or in Redis over the one link of the session store.

Built once from the configuration. The session store owns the link: its `start` opens the connections and its
`close` ends them, so everything else here must be closed before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.config.config import Config
from gateway.replicas.loads import MemoryLoads, RedisLoads, SharedLoads
from gateway.replicas.news import NoNews, RedisNews, SharedNews
from gateway.replicas.orders import MemoryOrders, RedisOrders, SharedOrders
from gateway.replicas.presence import MemoryPresence, RedisPresence, SharedPresence
from gateway.replicas.tenant_use import RedisTenantUse
from gateway.sessions.memory import MemoryStore
from gateway.sessions.redis_store import RedisStore
from gateway.sessions.store import SessionStore
from gateway.tenants.redis_keys import RedisKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedState:
    """The parts of one gateway that replicas share. None of the parts raises for trouble with Redis, except
    `redis_keys`, which raises CannotAuthenticate."""

    sessions: SessionStore
    objects: SessionStore
    """Who made which object that engines keep. Start it after `sessions`, close it before."""
    loads: SharedLoads
    news: SharedNews
    orders: SharedOrders
    presence: SharedPresence
    tenant_use: RedisTenantUse | None = None
    """None: tenants' limits are counted in this process alone."""
    redis_keys: RedisKeys | None = None
    """None: the configuration does not look up API keys in Redis."""


def open_shared_state(
    config: Config, *, clock: Callable[[], float], environ: Mapping[str, str]
) -> SharedState:
    """Build it; nothing is connected before `sessions.start`."""
    settings = config.sessions
    if settings.store == "memory":
        return SharedState(
            sessions=MemoryStore(ttl_s=settings.ttl_s, max_sessions=settings.max_sessions, clock=clock),
            objects=MemoryStore(ttl_s=settings.objects_ttl_s, max_sessions=settings.max_objects, clock=clock),
            loads=MemoryLoads(),
            news=NoNews(),
            orders=MemoryOrders(),
            presence=MemoryPresence(),
        )
    store = RedisStore(settings.redis, ttl_s=settings.ttl_s, clock=clock, environ=environ)
    link = store.link
    keys_ttl_s = config.authentication.keys_in_redis_ttl_s
    return SharedState(
        sessions=store,
        objects=RedisStore(settings.redis, ttl_s=settings.objects_ttl_s, clock=clock, beside=store),
        loads=RedisLoads(link, clock=clock),
        news=RedisNews(link),
        orders=RedisOrders(link),
        presence=RedisPresence(link),
        tenant_use=RedisTenantUse(link, clock=clock),
        redis_keys=RedisKeys(link, ttl_s=keys_ttl_s, clock=clock)
        if config.authentication.keys_in_redis
        else None,
    )
