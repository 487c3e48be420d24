"""Redis slow, silent, gone, full or speaking nonsense: what it costs a request, and how it ends.

Times are asserted only as "the budget, not the socket's timeout": 50 ms against a second and more.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from fakes.redis_server import RedisProcess, redis_server
from fakes.tcp_proxy import tcp_proxy
from redis.asyncio import Redis
from sessions.harness import key, proxied, started_redis_store, timed_claim, until, until_live

from gateway.redis_link.breaker import BreakerState
from gateway.redis_link.settings import RedisSettings
from gateway.sessions.redis_store import RedisStore
from gateway.values import BackendId, SessionKey

pytestmark = pytest.mark.redis

A, B = BackendId("a"), BackendId("b")
KEY = SessionKey("00112233445566778899aabbccddeeff")
WELL_BELOW_SOCKET_TIMEOUT_S = 0.7


async def assert_outage_is_cheap(store: RedisStore, outage: list[float]) -> None:
    """Requests at the beginning wait about one budget; once the breaker is open nobody asks at all."""
    outage += await asyncio.gather(*(timed_claim(store, number) for number in range(100, 150)))
    assert max(outage) < WELL_BELOW_SOCKET_TIMEOUT_S
    assert store.stats().breaker is not BreakerState.CLOSED
    assert store.stats().is_degraded
    num_calls = store.stats().num_calls
    for number in range(200, 300):
        assert await store.claim(key(number), A, 1) is None
        assert await store.get(key(number)) is None
    assert store.stats().num_calls == num_calls


async def test_paused_server(tmp_path: Path) -> None:
    """A stopped process that keeps its connections: cheap while it lasts, known sessions keep their home,
    and it is used again by itself."""
    with redis_server(tmp_path) as server:
        async with started_redis_store(proxied(server.port)) as store:
            await until_live(store)
            binding = await store.claim(KEY, A, 1)
            assert binding is not None
            server.pause()
            try:
                await assert_outage_is_cheap(store, [])
                store.renew(KEY, binding, context_tokens=77, num_turns=2)
                found = await store.get(KEY)
                assert found is not None
                assert (found.backend_id, found.context_tokens) == (A, 77)
            finally:
                server.resume()
            await until(lambda: store.stats().breaker is BreakerState.CLOSED, "the store is used again")
            await until(lambda: not store.stats().is_degraded, "nothing is degraded any more")
            await until(lambda: store.stats().num_pending_renewals == 0, "the renewal is sent")
            assert (await store.claim(key(999), B, 1)).backend_id == B  # type: ignore[union-attr]  # None fails


async def test_killed_and_restarted_server(tmp_path: Path) -> None:
    """Refused connections cost nearly nothing; after a restart, with its data lost, known sessions go home
    again for all replicas and new claims work."""
    with redis_server(tmp_path) as server:
        async with started_redis_store(proxied(server.port, local_ttl_s=0.001)) as store:
            await until_live(store)
            await store.claim(KEY, A, 1)
            server.kill()
            await assert_outage_is_cheap(store, [])
            assert (await store.get(KEY)).backend_id == A  # type: ignore[union-attr]  # None fails
            server.start()
            await until(lambda: not store.stats().is_degraded, "the store is used again")
            assert (await store.get(KEY)).backend_id == A  # type: ignore[union-attr]  # None fails
            assert (await store.claim(key(999), B, 1)).backend_id == B  # type: ignore[union-attr]  # None fails
            async with started_redis_store(proxied(server.port)) as second:
                assert (await second.get(KEY)).backend_id == A  # type: ignore[union-attr]  # None fails


async def test_renewal_that_failed_is_sent_again(shared_redis: RedisProcess) -> None:
    """What a turn told the store is not lost when the call that carried it fails."""
    async with tcp_proxy("127.0.0.1", shared_redis.port) as proxy:
        settings = proxied(proxy.port, budget_ms=1000, breaker_failures=1000, flush_interval_ms=100_000)
        async with started_redis_store(settings) as store:
            binding = await store.claim(KEY, A, 1)
            assert binding is not None
            store.renew(KEY, binding, context_tokens=77, num_turns=2)
            proxy.garbage = b"?\r\n"
            await store.flush()
            assert store.stats().num_pending_renewals == 1
            proxy.garbage = None
            await store.flush()
            assert store.stats().num_pending_renewals == 0
            async with started_redis_store(RedisSettings(url=shared_redis.url)) as fresh:
                assert (await fresh.get(KEY)).context_tokens == 77  # type: ignore[union-attr]  # None fails


async def test_lost_session_goes_home_at_its_next_turn(shared_redis: RedisProcess, redis: Redis) -> None:
    """Redis forgets everything without anybody noticing: the renewal of a turn brings it to light and writes
    nothing; the session's next turn binds it to the same home again, under a newer version."""
    async with started_redis_store(RedisSettings(url=shared_redis.url, budget_ms=1000)) as store:
        await until_live(store)
        before = await store.claim(KEY, A, 1, 500)
        assert before is not None
        await redis.flushdb()
        store.renew(KEY, before, context_tokens=700, num_turns=1)
        await store.flush()
        assert await redis.dbsize() == 0
        after = await store.get(KEY)
        assert after is not None
        assert (after.backend_id, after.context_tokens) == (A, 700)
        assert after.version > before.version
        assert await redis.exists("homing:{00}:s:" + KEY)


async def test_lost_session_follows_whoever_claimed_it_since(
    shared_redis: RedisProcess, redis: Redis
) -> None:
    """After a loss of data the first claim wins, also over a home that another replica remembers."""
    config = RedisSettings(url=shared_redis.url, budget_ms=1000)
    async with started_redis_store(config) as store, started_redis_store(config) as other:
        await until_live(store)
        before = await store.claim(KEY, A, 1)
        assert before is not None
        await redis.flushdb()
        await other.claim(KEY, B, 1)
        store.renew(KEY, before, context_tokens=700, num_turns=1)
        await store.flush()
        assert (await store.get(KEY)).backend_id == B  # type: ignore[union-attr]  # None fails


async def test_slow_server(shared_redis: RedisProcess) -> None:
    """Answers after two seconds are as good as none; when it is quick again it is used again."""
    async with (
        tcp_proxy("127.0.0.1", shared_redis.port) as proxy,
        started_redis_store(proxied(proxy.port)) as store,
    ):
        await until_live(store)
        proxy.delay_s = 2.0
        await assert_outage_is_cheap(store, [])
        proxy.delay_s = 0.0
        await until(lambda: store.stats().breaker is BreakerState.CLOSED, "the store is used again")


async def test_black_hole(shared_redis: RedisProcess) -> None:
    """Bytes that vanish while connections stay open."""
    async with (
        tcp_proxy("127.0.0.1", shared_redis.port) as proxy,
        started_redis_store(proxied(proxy.port)) as store,
    ):
        await until_live(store)
        proxy.is_silent = True
        await assert_outage_is_cheap(store, [])
        proxy.is_silent = False
        await until(lambda: not store.stats().is_degraded, "the store is used again")


@pytest.mark.parametrize(
    "garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$-7\r\n", b"*1\r\n", b"\x00\xff" * 9]
)
async def test_server_that_speaks_nonsense(shared_redis: RedisProcess, garbage: bytes) -> None:
    """What answers is no Redis: the same as away, and no exception."""
    async with tcp_proxy("127.0.0.1", shared_redis.port) as proxy:
        proxy.garbage = garbage
        async with started_redis_store(proxied(proxy.port, socket_timeout_ms=200)) as store:
            for number in range(20):
                assert await store.claim(key(number), A, 1) is None
            assert store.stats().is_degraded
            proxy.garbage = None
            await until(lambda: not store.stats().is_degraded, "the store is used again")


async def test_key_that_cannot_be_sent(shared_redis: RedisProcess) -> None:
    """A key that is no text (half of a surrogate pair) has no home, and raises nothing."""
    async with started_redis_store(RedisSettings(url=shared_redis.url)) as store:
        assert await store.claim(SessionKey("\ud800"), A, 1) is None
        assert await store.get(SessionKey("\ud800")) is None
        assert store.stats().errors == {"unexpected": 2}


async def test_away_from_the_start() -> None:
    """A store can be started, asked and closed while nobody listens where Redis should be."""
    async with tcp_proxy("127.0.0.1", 1) as proxy, started_redis_store(proxied(proxy.port)) as store:
        assert await store.get(KEY) is None
        assert await store.claim(KEY, A, 1) is None
        assert await store.rebind(KEY, 1, B, 1) is None
        assert await store.end(KEY) is False
        assert await store.list_by_backend(A) == ([], None)
        assert await store.count_by_backend() == {}


async def test_cancelled_callers_leave_no_foreign_answers(shared_redis: RedisProcess) -> None:
    """Five hundred callers leave at random moments of a slow claim; afterwards each session is found at its
    own backend and never another's."""
    chance = random.Random(7)
    async with (
        tcp_proxy("127.0.0.1", shared_redis.port) as proxy,
        started_redis_store(
            proxied(proxy.port, budget_ms=5000, local_max_sessions=1, heartbeat_interval_ms=5000)
        ) as store,
    ):
        await until_live(store)
        proxy.delay_s = 0.02

        async def leave_early(number: int) -> None:
            task = asyncio.create_task(store.claim(key(number), BackendId(f"own-{number}"), 1))
            await asyncio.wait({task}, timeout=chance.uniform(0.0, 0.6))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(leave_early(number) for number in range(500)))
        proxy.delay_s = 0.0
        num_found = 0
        for number in range(500):
            binding = await store.get(key(number))
            if binding is not None:
                assert binding.backend_id == f"own-{number}"
                num_found += 1
        assert num_found > 0
        await until(lambda: store.link.num_under_way == 0, "nothing is left under way")
        assert store.stats().errors == {}
        assert proxy.num_open <= 16 + 1


async def test_claim_that_comes_late_is_remembered(shared_redis: RedisProcess) -> None:
    """A claim whose caller gave up is completed, and the session's next turn finds it without asking."""
    async with (
        tcp_proxy("127.0.0.1", shared_redis.port) as proxy,
        started_redis_store(proxied(proxy.port, breaker_failures=100)) as store,
    ):
        await until_live(store)
        proxy.delay_s = 0.15
        assert await store.claim(KEY, A, 1) is None
        await until(lambda: store.stats().num_sessions == 1, "the answer has come")
        hits = store.stats().num_local_hits
        assert (await store.get(KEY)).backend_id == A  # type: ignore[union-attr]  # None fails
        assert store.stats().num_local_hits == hits + 1


@pytest.mark.parametrize("is_cutting_late", [False, True])
async def test_connection_cut_at_each_command(
    shared_redis: RedisProcess, redis: Redis, is_cutting_late: bool
) -> None:
    """The n-th piece sent cuts its connection, before or after it took effect, for n = 0, 1, 2 … until
    a whole session passes uncut: no exception, and never a home that Redis does not hold."""
    async with tcp_proxy("127.0.0.1", shared_redis.port) as proxy:
        for cut_after in range(40):
            await redis.flushdb()
            settings = proxied(proxy.port, breaker_failures=1000, budget_ms=2000)
            proxy.cut_after = None
            async with started_redis_store(settings) as store:
                proxy.cut_after, proxy.is_cutting_late = cut_after, is_cutting_late
                claimed = await store.claim(KEY, A, 1)
                if claimed is not None:
                    store.renew(KEY, claimed, context_tokens=5, num_turns=1)
                    await store.flush()
                    await store.rebind(KEY, claimed.version, B, 1)
                found = await store.get(KEY)
                was_cut = proxy.cut_after is None
                proxy.cut_after = None
                value = await redis.get("homing:{00}:s:" + KEY)
                if found is not None:
                    assert isinstance(value, bytes)
                    assert value.decode().split()[-1] in (A, B)
                ended = await store.end(KEY)
                assert ended == (value is not None)
                assert await store.get(KEY) is None
            if not was_cut:
                break
        else:
            pytest.fail("a session never passed uncut")
        assert cut_after > 3


async def test_full_server_refuses_and_serves_what_it_has(shared_redis: RedisProcess, redis: Redis) -> None:
    """Out of memory: claims answer None, homes are still read, and the breaker stays closed."""
    async with started_redis_store(RedisSettings(url=shared_redis.url)) as store:
        await until_live(store)
        await store.claim(KEY, A, 1)
        await redis.config_set("maxmemory", "1")
        try:
            async with started_redis_store(RedisSettings(url=shared_redis.url)) as fresh:
                assert await fresh.claim(key(1), B, 1) is None
                assert fresh.stats().is_degraded
                assert fresh.stats().errors["refused"] == 1
                assert (await fresh.get(KEY)).backend_id == A  # type: ignore[union-attr]  # None fails
                assert fresh.stats().breaker is BreakerState.CLOSED
        finally:
            await redis.config_set("maxmemory", "0")
        assert await store.claim(key(1), B, 1) is not None
