"""TLS towards clients: the whole relay under it, client certificates, and certificates that change."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import backend as fake
from fakes.certificates import Authority
from fakes.gateway_world import GatewayWorld

from gateway.downstream.tls import ListenerTls, make_server_context

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")

CHAT = "/v1/chat/completions"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"Hel"}}]}\n\n'
BODY = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]}
_BODY_BYTES = json.dumps(BODY).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
    % (
        len(_BODY_BYTES),
        _BODY_BYTES,
    )
)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path)
    made.issue("server")
    return made


def tls_section(authority: Authority, **options: Any) -> dict[str, Any]:
    files = {"cert_file": authority.path("server.pem"), "key_file": authority.path("server.key")}
    return {"port": 0, "tls": {**files, **options}}


def trusting(authority: Authority, client: str | None = None) -> ssl.SSLContext:
    """What a client that trusts this authority connects with."""
    context = ssl.create_default_context(cafile=authority.path("ca.pem"))
    if client is not None:
        context.load_cert_chain(authority.path(f"{client}.pem"), authority.path(f"{client}.key"))
    return context


def client_of(world: GatewayWorld, context: ssl.SSLContext) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"https://127.0.0.1:{world.gateway.port}", verify=context, timeout=10)


async def serial_of(port: int, context: ssl.SSLContext) -> str:
    """Serial number of the certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = writer.get_extra_info("peercert")
    writer.close()
    await writer.wait_closed()
    return str(shown["serialNumber"])


async def test_requests_streams_and_large_bodies(authority: Authority) -> None:
    """Keep-alive, a stream in single events, a megabyte up and several down come through unaltered."""
    gate = asyncio.Event()
    large = b'{"answer": "' + b"x" * 5_000_000 + b'"}'
    async with (
        GatewayWorld(num_backends=1, listen=tls_section(authority)) as world,
        client_of(world, trusting(authority)) as client,
    ):
        backend = world.backends[0]
        assert (await client.get("/readyz")).status_code == 200
        backend.default = fake.respond(large)
        sent = {**BODY, "padding": "y" * 1_000_000}
        answer = await client.post(CHAT, json=sent)
        assert answer.content == large
        assert backend.requests[-1].json == sent
        backend.default = fake.stream(EVENT, b"data: [DONE]\n\n", gates={1: gate})
        async with client.stream("POST", CHAT, json={**BODY, "stream": True}) as stream:
            pieces = stream.aiter_raw()
            assert await anext(pieces) == EVENT
            gate.set()
            assert b"".join([piece async for piece in pieces]) == b"data: [DONE]\n\n"
        world.assert_idle()


async def test_the_protocol_is_http_1_1_over_a_new_tls(authority: Authority) -> None:
    """ALPN picks http/1.1; a version below `min_version` is refused."""
    async with GatewayWorld(num_backends=0, listen=tls_section(authority, min_version="1.3")) as world:
        context = trusting(authority)
        context.set_alpn_protocols(["h2", "http/1.1"])
        _, writer = await asyncio.open_connection("127.0.0.1", world.gateway.port, ssl=context)
        tls = writer.get_extra_info("ssl_object")
        assert (tls.selected_alpn_protocol(), tls.version()) == ("http/1.1", "TLSv1.3")
        writer.close()
        await writer.wait_closed()
        context = trusting(authority)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await asyncio.open_connection("127.0.0.1", world.gateway.port, ssl=context)


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_client_that_leaves_stops_the_engine(authority: Authority, how: str) -> None:
    """Mid-stream and before the answer; a closed TLS connection is a client that has gone."""
    async with GatewayWorld(num_backends=1, listen=tls_section(authority)) as world:
        backend = world.backends[0]
        for number, behaviour in enumerate((fake.hang(), fake.stream(EVENT, then="wait"))):
            backend.default = behaviour
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", world.gateway.port, ssl=trusting(authority)
            )
            writer.write(REQUEST)
            await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 1)
            if number:
                await reader.readuntil(EVENT)
            writer.close() if how == "close" else writer.transport.abort()
            await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 0)
            await world.wait_for(lambda number=number: backend.num_cancelled == number + 1)  # type: ignore[misc]  # bound early
        world.assert_idle()


async def test_a_client_that_reads_slowly_holds_the_backend_back(authority: Authority) -> None:
    """The relay's water marks work on the encrypted transport: memory is bounded, nothing is lost."""
    size = 30_000_000
    downstream = {"write_buffer_bytes": 65_536}
    async with GatewayWorld(num_backends=1, listen=tls_section(authority), downstream=downstream) as world:
        world.backends[0].default = fake.respond(b"z" * size)
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", world.gateway.port, ssl=trusting(authority), limit=65_536
        )
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        await world.wait_for(lambda: _is_held_back(world))
        received = 0
        while piece := await reader.read(1 << 16):
            received += len(piece)
        assert received == size
        writer.close()
        await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 0)


def _is_held_back(world: GatewayWorld) -> bool:
    server = world.gateway.servers._server
    assert server is not None
    return any(connection.is_writing_paused for connection in server.connections)


async def test_clients_must_show_a_certificate(authority: Authority, tmp_path: Path) -> None:
    """mTLS: ours are served, none and a stranger's are refused before any request is read."""
    authority.issue("friend", "DNS:friend")
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other")
    stranger.issue("stranger")
    listen = tls_section(authority, client_ca_file=authority.path("ca.pem"))
    async with GatewayWorld(num_backends=1, listen=listen) as world:
        async with client_of(world, trusting(authority, "friend")) as client:
            assert (await client.post(CHAT, json=BODY)).status_code == 200
        foreign = trusting(authority)
        foreign.load_cert_chain(stranger.path("stranger.pem"), stranger.path("stranger.key"))
        for context in (trusting(authority), foreign):
            async with client_of(world, context) as client:
                with pytest.raises(httpx.TransportError):
                    await client.post(CHAT, json=BODY)
        assert len(world.backends[0].requests) == 1


async def test_a_rotated_certificate_serves_new_connections(authority: Authority) -> None:
    """A stream that runs through the rotation ends well; the next connection is shown the new one."""
    gate = asyncio.Event()
    async with (
        GatewayWorld(num_backends=1, listen=tls_section(authority)) as world,
        client_of(world, trusting(authority)) as client,
    ):
        gateway = world.gateway
        world.backends[0].default = fake.stream(EVENT, b"data: [DONE]\n\n", gates={1: gate})
        before = await serial_of(gateway.port, trusting(authority))
        async with client.stream("POST", CHAT, json={**BODY, "stream": True}) as stream:
            pieces = stream.aiter_raw()
            await anext(pieces)
            authority.issue("server")
            assert (await gateway.reloader.renew_certificates()).outcome == "unchanged"
            after = await serial_of(gateway.port, trusting(authority))
            gate.set()
            assert b"".join([piece async for piece in pieces]) == b"data: [DONE]\n\n"
        assert before != after
        assert (await client.get("/readyz")).status_code == 200


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def _pair_with_another_key(path: Path) -> None:
    shutil.copy(path.with_name("ca.key"), path.with_name("server.key"))


@pytest.mark.parametrize("spoil", [_cut, Path.unlink, _pair_with_another_key])
async def test_a_bad_certificate_keeps_the_old_one(
    authority: Authority, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """Half written, gone, or with another's key: it is told, and the one in use goes on."""
    async with GatewayWorld(num_backends=0, listen=tls_section(authority)) as world:
        before = await serial_of(world.gateway.port, trusting(authority))
        spoil(tmp_path / "server.pem")
        report = await world.gateway.reloader.renew_certificates()
        assert report.outcome == "rejected"
        assert report.errors[0].startswith("listen.tls: cert_file ")
        assert await serial_of(world.gateway.port, trusting(authority)) == before


async def test_the_admin_listener_has_its_own(authority: Authority) -> None:
    """`admin.tls` alone: plain HTTP for clients, TLS for operators."""
    async with GatewayWorld(num_backends=1, admin=tls_section(authority)) as world:
        assert (await world.client.get("/readyz")).status_code == 200
        base_url = f"https://127.0.0.1:{world.gateway.admin_port}"
        async with httpx.AsyncClient(base_url=base_url, verify=trusting(authority)) as admin:
            assert (await admin.get("/admin/v1/status")).status_code == 200


def test_a_key_with_a_passphrase_is_refused(authority: Authority, tmp_path: Path) -> None:
    """Nobody is asked on a terminal."""
    authority._openssl("ec", "-in", "server.key", "-aes256", "-passout", "pass:x", "-out", "locked.key")
    tls = ListenerTls(cert_file=authority.path("server.pem"), key_file=authority.path("locked.key"))
    with pytest.raises(ValueError, match="has a passphrase"):
        make_server_context(tls)
