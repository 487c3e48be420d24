"""What a debugger shows of the parts that one looks into."""

from __future__ import annotations

from gateway.fleet.pools import UpstreamPools
from gateway.fleet.registry import Fleet
from gateway.limits.gate import Gate, QueueRoom
from gateway.redis_link.settings import RedisSettings
from gateway.routing.health import HealthSettings
from gateway.sessions.memory import MemoryStore
from gateway.sessions.redis_store import RedisStore
from gateway.upstream.settings import UpstreamSettings
from gateway.values import Backend, BackendId, SessionKey


async def test_each_shows_its_status_in_one_line() -> None:
    """State and counts, never a key, a secret or an address."""
    fleet = Fleet(HealthSettings())
    assert repr(fleet) == "<Fleet generation 0: empty>"
    fleet.add(Backend(backend_id=BackendId("a"), base_url="http://a:1"))
    assert repr(fleet) == "<Fleet generation 1: 1 joining>"
    pools = UpstreamPools(fleet, UpstreamSettings())
    pools.get(BackendId("a"))
    assert repr(pools) == "<UpstreamPools for 1 backends, 0 closing>"
    await pools.close()
    gate = Gate(2, QueueRoom(5))
    assert gate.try_enter()
    assert repr(gate) == "<Gate 1 of 2 places taken, 0 waiting>"
    memory = MemoryStore(max_sessions=10)
    await memory.claim(SessionKey("key"), BackendId("a"), 1)
    assert repr(memory) == "<MemoryStore 1 of 10 sessions on 1 backends>"
    redis = RedisStore(RedisSettings(url="redis://127.0.0.1:1/0"), environ={})
    assert repr(redis) == "<RedisStore breaker closed, 0 sessions cached, 0 renewals pending>"
    await redis.close()
