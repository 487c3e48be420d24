"""One name in front of two servers whose roles are swapped while connections stay open (G04), and other ways
in which a server says that somebody else should be asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.redis_server import RedisProcess, free_port, redis_server, start_server, wait_until
from fakes.tcp_proxy import TcpProxy, tcp_proxy
from redis.exceptions import MovedError, ReadOnlyError, RedisError, ResponseError
from sessions.harness import key, proxied, started_redis_store, until, until_live

from gateway.redis_link.breaker import BreakerState
from gateway.redis_link.connection import is_wrong_server
from gateway.redis_link.settings import RedisSettings
from gateway.sessions.redis_store import RedisStore
from gateway.values import BackendId, SessionKey

pytestmark = pytest.mark.redis

A = BackendId("a")
KEY = SessionKey("00112233445566778899aabbccddeeff")
EVENT = "session_store_wrong_server"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RedisProcess, RedisProcess]]:
    """A master and its replica."""
    with redis_server(tmp_path / "one") as one, redis_server(tmp_path / "two") as two:
        two.ask("REPLICAOF", "127.0.0.1", str(one.port))
        wait_until(lambda: b"master_link_status:up" in two.ask("INFO", "replication"), "replica in sync")
        yield one, two


def swap_roles(old: RedisProcess, new: RedisProcess) -> None:
    """The replica becomes the master of its master; nobody's connections are closed."""
    assert new.ask("REPLICAOF", "NO", "ONE") == b"+OK\r\n"
    assert old.ask("REPLICAOF", "127.0.0.1", str(new.port)) == b"+OK\r\n"


async def claims_until_one_is_bound(store: RedisStore, limit_s: float) -> int:
    """Claim sessions of their own, one every 10 ms; how many were refused before one was bound."""
    started_s, number = time.monotonic(), 1000
    while await store.claim(key(number), A, 1) is None:
        assert time.monotonic() - started_s < limit_s, f"still refused after {limit_s} s"
        number += 1
        await asyncio.sleep(0.01)
    return number - 1000


def num_logged(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.getMessage() == EVENT for record in caplog.records)


async def fill_pool(store: RedisStore, proxy: TcpProxy) -> None:
    """Open all connections that the store may use."""
    await asyncio.gather(*(store.claim(key(number), A, 1) for number in range(50)))
    assert proxy.num_open > 10


async def test_swapped_roles_are_followed(
    pair: tuple[RedisProcess, RedisProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """The name leads to the new master at once: one claim is refused, and no other by any of the connections
    to the old one; homes from before are known, and the log says it once."""
    one, two = pair
    async with (
        tcp_proxy("127.0.0.1", one.port) as proxy,
        started_redis_store(RedisSettings(url=f"redis://127.0.0.1:{proxy.port}/0")) as store,
    ):
        await until_live(store)
        await fill_pool(store, proxy)
        await store.claim(KEY, A, 1)
        one.ask("WAIT", "1", "1000")
        proxy.target = ("127.0.0.1", two.port)
        swap_roles(one, two)
        assert await claims_until_one_is_bound(store, 1.0) == 1
        bound = await asyncio.gather(*(store.claim(key(number), A, 1) for number in range(2000, 2100)))
        assert all(bound)
        assert (await store.get(KEY)).backend_id == A  # type: ignore[union-attr]  # None fails
        assert num_logged(caplog) == 1
        assert b":1\r\n" in two.ask("EXISTS", "homing:{00}:s:" + key(2000))
        assert store.stats().breaker is BreakerState.CLOSED
        await until(lambda: not store.stats().is_degraded, "nothing is degraded any more")


async def test_name_that_changes_later_is_followed(
    pair: tuple[RedisProcess, RedisProcess], caplog: pytest.LogCaptureFixture
) -> None:
    """The name still leads to the old master for a while: it is resolved again once per interval, not for
    each refusal, and the new master is found within an interval of when the name leads there."""
    one, two = pair
    async with (
        tcp_proxy("127.0.0.1", one.port) as proxy,
        started_redis_store(proxied(proxy.port, heartbeat_interval_ms=300)) as store,
    ):
        await until_live(store)
        swap_roles(one, two)
        num_accepted = proxy.num_accepted
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            assert await store.claim(key(0), A, 1) is None
            await asyncio.sleep(0.005)
        assert 1 <= num_logged(caplog) <= 5
        assert proxy.num_accepted - num_accepted <= 5 * 2  # beats may use a second connection
        proxy.target = ("127.0.0.1", two.port)
        await claims_until_one_is_bound(store, 1.0)


async def test_replica_without_its_master_is_left(
    pair: tuple[RedisProcess, RedisProcess], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """MASTERDOWN: a replica that has lost its master and serves nothing stale. What it cannot read is not
    taken for a session that does not exist."""
    one, two = pair
    async with (
        tcp_proxy("127.0.0.1", two.port) as proxy,
        started_redis_store(RedisSettings(url=f"redis://127.0.0.1:{proxy.port}/0")) as store,
    ):
        await until_live(store)
        two.ask("CONFIG", "SET", "replica-serve-stale-data", "no")
        two.ask("REPLICAOF", "127.0.0.1", str(free_port()))
        assert await store.get(KEY) is None
        assert store.stats().errors == {"refused": 1}
        assert num_logged(caplog) == 1
        proxy.target = ("127.0.0.1", one.port)
        await claims_until_one_is_bound(store, 1.5)


@pytest.mark.parametrize("code", ["CLUSTERDOWN", "MOVED"])
async def test_cluster_node_behind_a_plain_url_is_left(
    tmp_path: Path, shared_redis: RedisProcess, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    """The name led to a node of a Cluster: nobody serves our keys, or another node does."""
    node = start_server(tmp_path / "node", "--cluster-enabled", "yes")
    other = start_server(tmp_path / "other", "--cluster-enabled", "yes")
    if code == "MOVED":
        other.ask("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        node.ask("CLUSTER", "MEET", "127.0.0.1", str(other.port))
        wait_until(lambda: b"cluster_state:ok" in node.ask("CLUSTER", "INFO"), "the nodes know each other")
    assert code.encode() in node.ask("GET", "homing:{00}:probe")
    try:
        async with (
            tcp_proxy("127.0.0.1", node.port) as proxy,
            started_redis_store(proxied(proxy.port)) as store,
        ):
            assert await store.claim(KEY, A, 1) is None
            assert num_logged(caplog) == 1
            proxy.target = ("127.0.0.1", shared_redis.port)
            await claims_until_one_is_bound(store, 1.5)
            assert store.stats().breaker is BreakerState.CLOSED
    finally:
        node.kill()
        other.kill()


async def test_server_that_loads_its_data_is_left(
    shared_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """LOADING: the server behind the name has restarted; the one that the name leads to next is used."""
    async with tcp_proxy("127.0.0.1", shared_redis.port) as proxy:
        settings = proxied(proxy.port, heartbeat_interval_ms=200)
        async with started_redis_store(settings) as store:
            await until_live(store)
            proxy.garbage = b"-LOADING Redis is loading the dataset in memory\r\n"
            assert await store.claim(KEY, A, 1) is None
            assert num_logged(caplog) == 1
            proxy.garbage = None
            await claims_until_one_is_bound(store, 1.5)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ReadOnlyError("You can't write against a read only replica.", status_code="READONLY"), True),
        (
            ResponseError("READONLY You can't write against a read only replica. script: 12ab, on @1"),
            True,
        ),
        (
            ResponseError(
                "Error running script (call to f_12ab): @user_script:3: -READONLY You can't write",
                status_code="ERR",
            ),
            True,
        ),
        (MovedError("3999 127.0.0.1:6381", status_code="MOVED"), True),
        (ResponseError("CLUSTERDOWN Hash slot not served"), True),
        (ResponseError("MASTERDOWN Link with MASTER is down"), True),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), False),
        (ResponseError("OOM command not allowed when used memory > 'maxmemory'."), False),
        (ResponseError("ERR unknown command 'READONLY', with args beginning with: "), False),
        (ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"), False),
    ],
)
def test_which_errors_mean_another_server(error: RedisError, expected: bool) -> None:
    """Also where the word is inside the error of a script, as before Redis 7."""
    assert is_wrong_server(error) is expected
