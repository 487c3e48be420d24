"""TLS towards backends with certificates made on the spot: trust, names, client certificates."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import AsyncIterator

import pytest
from fakes.backend import FakeBackend, respond
from fakes.certificates import Authority

from gateway.errors import UpstreamConnectFailed, UpstreamError
from gateway.upstream.pool import UpstreamPool
from gateway.upstream.settings import TlsSettings, UpstreamSettings

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")

HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One authority, a certificate of 127.0.0.1 and `engine.internal`, and one of a client."""
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    authority.issue("server", "IP:127.0.0.1,DNS:engine.internal")
    authority.issue("client", "DNS:gateway")
    return authority


def server_context(certificates: Authority, *, wants_client: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.path("server.pem"), certificates.path("server.key"))
    if wants_client:
        context.load_verify_locations(certificates.path("ca.pem"))
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.fixture
async def backend(certificates: Authority) -> AsyncIterator[FakeBackend]:
    async with FakeBackend(ssl=server_context(certificates), default=respond(b"secret")) as started:
        yield started


async def call(backend: FakeBackend, tls: TlsSettings, base_url: str | None = None) -> bytes:
    pool = UpstreamPool(base_url or backend.base_url, UpstreamSettings(tls=tls))
    try:
        for _ in range(2):
            exchange = await pool.open(HEAD, b"", method="GET")
            body = await exchange.read(100)
        assert pool.stats().num_reused_total == 1
        return body
    finally:
        await pool.close()


async def test_own_authority_is_trusted(backend: FakeBackend, certificates: Authority) -> None:
    """`ca_file` names whom to trust; the connection is kept and reused."""
    assert await call(backend, TlsSettings(ca_file=certificates.path("ca.pem"))) == b"secret"


async def test_unknown_authority_is_refused(backend: FakeBackend) -> None:
    """Without it the handshake fails, as a connect failure that names the reason."""
    with pytest.raises(UpstreamConnectFailed, match="certificate refused"):
        await call(backend, TlsSettings())
    assert backend.requests == []


async def test_verification_can_be_switched_off(backend: FakeBackend) -> None:
    """`verify: false` accepts any certificate."""
    assert await call(backend, TlsSettings(verify=False)) == b"secret"


async def test_wrong_name_is_refused(backend: FakeBackend, certificates: Authority) -> None:
    """The certificate must be for the name we ask for, which `server_name` may change."""
    ca_file = certificates.path("ca.pem")
    with pytest.raises(UpstreamConnectFailed, match="certificate refused"):
        await call(backend, TlsSettings(ca_file=ca_file, server_name="other.internal"))
    assert await call(backend, TlsSettings(ca_file=ca_file, server_name="engine.internal")) == b"secret"


async def test_client_certificate(certificates: Authority) -> None:
    """A backend that asks for our certificate gets it; without one it refuses us."""
    context = server_context(certificates, wants_client=True)
    async with FakeBackend(ssl=context, default=respond(b"secret")) as backend:
        tls = TlsSettings(
            ca_file=certificates.path("ca.pem"),
            client_cert_file=certificates.path("client.pem"),
            client_key_file=certificates.path("client.key"),
        )
        assert await call(backend, tls) == b"secret"
        with pytest.raises(UpstreamError):  # TLS 1.3: noticed at the first read
            await call(backend, TlsSettings(ca_file=certificates.path("ca.pem")))


@pytest.mark.parametrize(
    "tls", [TlsSettings(ca_file="/nowhere/ca.pem"), TlsSettings(client_cert_file="/nowhere/c.pem")]
)
async def test_missing_files_are_named(tls: TlsSettings) -> None:
    """A file that cannot be read fails when the pool is made, and is named."""
    with pytest.raises(ValueError, match=r"tls\..*_file '/nowhere/"):
        UpstreamPool("https://127.0.0.1:1", UpstreamSettings(tls=tls))


async def test_plain_text_port_is_a_connect_failure(certificates: Authority) -> None:
    """https towards a port that speaks plain HTTP fails in the handshake, not later."""
    async with FakeBackend() as backend:
        with pytest.raises(UpstreamConnectFailed):
            await call(backend, TlsSettings(verify=False), f"https://127.0.0.1:{backend.port}")
