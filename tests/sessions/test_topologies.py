"""The same store behind Sentinels, on a Cluster, over TLS and as an ACL user."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.redis_server import (
    ClusterSetup,
    RedisProcess,
    SentinelSetup,
    free_port,
    redis_cluster,
    redis_sentinels,
    redis_server,
)
from sessions import test_contract as contract
from sessions.harness import TTL_S, Harness, started_redis_store, until, until_live

from gateway.redis_link.settings import RedisSettings, RedisTlsSettings
from gateway.sessions.redis_store import RedisStore
from gateway.values import BackendId, SessionKey

pytestmark = pytest.mark.redis

A, B = BackendId("a"), BackendId("b")

# The parts of the contract that another topology could break: atomicity, versions, indexes over shards.
CHOSEN_CONTRACT = [
    contract.test_claim_binds,
    contract.test_concurrent_claims_have_one_winner,
    contract.test_renew_notes_size_and_turns,
    contract.test_concurrent_rebinds_agree,
    contract.test_late_renewal_cannot_restore_an_older_home,
    contract.test_versions_are_never_reused,
    contract.test_end_tells_whether_there_was_one,
    contract.test_listing_names_each_session_of_a_backend,
    contract.test_listing_survives_changes_between_pages,
    contract.test_odd_keys_and_names_are_kept_apart,
]


def key(number: int) -> SessionKey:
    return SessionKey(f"{number * 7919:032x}")


def settings(**options: Any) -> RedisSettings:
    return RedisSettings(**{"budget_ms": 1000, "heartbeat_interval_ms": 200, **options})


async def no_time_passes(seconds: float) -> None:
    raise NotImplementedError("the chosen tests let no time pass")


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelSetup]:
    with redis_sentinels(tmp_path_factory.mktemp("sentinels")) as setup:
        yield setup


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterSetup]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as setup:
        yield setup


def sentinel_settings(setup: SentinelSetup) -> RedisSettings:
    return settings(sentinels=tuple(sentinel.address for sentinel in setup.sentinels))


async def run_contract(config: RedisSettings) -> None:
    """All chosen tests, each with a prefix of its own."""
    for number, check in enumerate(CHOSEN_CONTRACT):
        own = settings(
            url=config.url,
            sentinels=config.sentinels,
            cluster_nodes=config.cluster_nodes,
            key_prefix=f"contract{number}",
            budget_ms=20_000,  # the contract is not about time, and the machine may be busy
            breaker_failures=100,
        )
        async with started_redis_store(own, ttl_s=TTL_S) as store:
            await until_live(store)
            await check(Harness(store=store, settle=store.flush, advance=no_time_passes))


async def test_contract_behind_sentinels(sentinels: SentinelSetup) -> None:
    """The chosen part of the contract holds behind Sentinels."""
    await run_contract(sentinel_settings(sentinels))


async def test_contract_over_a_unix_socket(tmp_path: Path) -> None:
    """The chosen part of the contract holds over a Unix socket."""
    path = tmp_path / "s"
    with redis_server(tmp_path, "--unixsocket", str(path)):
        await run_contract(settings(url=f"unix://{path}"))


async def test_contract_on_a_cluster(cluster: ClusterSetup) -> None:
    """The chosen part of the contract holds on a Cluster, where sessions lie on all masters."""
    await run_contract(settings(cluster_nodes=cluster.addresses))


async def test_cluster_shards_reach_every_master(cluster: ClusterSetup) -> None:
    """A few hundred sessions spread over the three masters, and the counts add up."""
    async with started_redis_store(settings(cluster_nodes=cluster.addresses, key_prefix="spread")) as store:
        for number in range(300):
            assert await store.claim(key(number), A, 1) is not None
        assert await store.count_by_backend() == {A: 300}
        sizes = [int(node.ask("DBSIZE")[1:]) for node in cluster.nodes if b"role:master" in node.ask("INFO")]
        assert len(sizes) == 3
        assert min(sizes) > 50


async def claim_until_all_work(store: RedisStore) -> None:
    """New sessions in all shards, hundred by hundred, until none of a hundred is refused."""
    for first in range(1000, 100_000, 100):
        answers = await asyncio.gather(*(store.claim(key(first + n), B, 1) for n in range(100)))
        if all(answers):
            return
        await asyncio.sleep(0.1)


async def survive_fail_over(store: RedisStore, kill: Callable[[], None], keys: list[SessionKey]) -> None:
    """Known sessions keep their home all the while; afterwards all is as before, without a restart."""
    await until_live(store)
    for session in keys:
        assert await store.claim(session, A, 1) is not None
    await asyncio.sleep(0.3)  # replication to the other server is not acknowledged to anyone
    kill()
    for session in keys:
        assert (await store.get(session)).backend_id == A  # type: ignore[union-attr]  # None fails
    async with asyncio.timeout(25):
        await claim_until_all_work(store)
        await until(lambda: not store.stats().is_degraded, "all is well again")
    assert store.stats().errors
    for session in keys:
        assert (await store.get(session)).backend_id == A  # type: ignore[union-attr]  # None fails


async def test_sentinel_fail_over(sentinels: SentinelSetup) -> None:
    """The master dies: its replica is used within seconds, and a second gateway finds all sessions there."""
    keys = [key(number) for number in range(50)]
    async with started_redis_store(sentinel_settings(sentinels)) as store:
        await survive_fail_over(store, sentinels.master.kill, keys)
        async with started_redis_store(sentinel_settings(sentinels)) as second:
            for session in keys:
                assert (await second.get(session)).backend_id == A  # type: ignore[union-attr]  # None fails


async def test_cluster_fail_over(cluster: ClusterSetup) -> None:
    """One of three masters dies: its replica takes over, and a second gateway finds all sessions."""
    keys = [key(number) for number in range(100)]
    config = settings(cluster_nodes=cluster.addresses, key_prefix="fail-over")
    async with started_redis_store(config) as store:
        await survive_fail_over(store, cluster.nodes[0].kill, keys)
        async with started_redis_store(config) as second:
            for session in keys:
                assert (await second.get(session)).backend_id == A  # type: ignore[union-attr]  # None fails


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cert.pem and key.pem for 127.0.0.1, which is its own authority."""
    folder = tmp_path_factory.mktemp("certificate")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", "/CN=homing-test", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )
    return folder


@pytest.fixture(scope="module")
def secure_server(
    tmp_path_factory: pytest.TempPathFactory, certificate: Path
) -> Iterator[tuple[RedisProcess, int]]:
    """A server with a TLS port that asks for client certificates, and one restricted ACL user."""
    tls_port = free_port()
    options = [
        *("--tls-port", str(tls_port), "--tls-cert-file", str(certificate / "cert.pem")),
        *(
            "--tls-key-file",
            str(certificate / "key.pem"),
            "--tls-ca-cert-file",
            str(certificate / "cert.pem"),
        ),
    ]
    with redis_server(tmp_path_factory.mktemp("secure"), *options) as server:
        rules = "on >hunter2 ~homing:* &homing:* -@all +@read +@write +@pubsub +@connection -@dangerous"
        server.ask("ACL", "SETUSER", "gateway", *rules.split(), "+eval", "+evalsha", "+time")
        yield server, tls_port


async def test_tls_with_client_certificate(
    secure_server: tuple[RedisProcess, int], certificate: Path
) -> None:
    """Commands and the channel both go over TLS, and both sides check the other's certificate."""
    tls = RedisTlsSettings(
        enabled=True,
        ca_file=str(certificate / "cert.pem"),
        cert_file=str(certificate / "cert.pem"),
        key_file=str(certificate / "key.pem"),
    )
    config = settings(url=f"redis://127.0.0.1:{secure_server[1]}/0", tls=tls)
    async with started_redis_store(config) as store:
        await until_live(store)
        assert await store.claim(key(1), A, 1) is not None


async def test_tls_does_not_trust_a_stranger(secure_server: tuple[RedisProcess, int]) -> None:
    """A server whose certificate no known authority signed is not talked to."""
    config = settings(url=f"rediss://127.0.0.1:{secure_server[1]}/0")
    async with started_redis_store(config) as store:
        assert await store.claim(key(2), A, 1) is None
        assert store.stats().is_degraded


async def test_acl_user_needs_little(secure_server: tuple[RedisProcess, int]) -> None:
    """A user who may touch our keys and channels only, and run scripts, can do everything the store does."""
    config = settings(url=secure_server[0].url, username="gateway", password_env="SECRET_NAME")
    store = RedisStore(config, environ={"SECRET_NAME": "hunter2"})
    await store.start()
    await until_live(store)
    claimed = await store.claim(key(3), A, 1)
    assert claimed is not None
    store.renew(key(3), claimed, context_tokens=1, num_turns=1)
    await store.flush()
    assert (await store.rebind(key(3), claimed.version, B, 1)).backend_id == B  # type: ignore[union-attr]  # None fails
    await until(lambda: store.stats().num_invalidations == 1, "the move is announced")
    assert len((await store.list_by_backend(B))[0]) == 1
    assert (await store.count_by_backend())[B] == 1
    assert await store.end(key(3))
    assert store.stats().errors == {}
    await store.close()


async def test_wrong_password_is_an_outage(secure_server: tuple[RedisProcess, int]) -> None:
    """A refused login is no exception: sessions go unpinned, degraded."""
    config = settings(url=secure_server[0].url, username="gateway", password_env="SECRET_NAME")
    store = RedisStore(config, environ={"SECRET_NAME": "wrong"})
    await store.start()
    assert await store.claim(key(4), A, 1) is None
    assert store.stats().is_degraded
    await store.close()
