"""What the server refuses, and how: raw bytes in, JSON errors out, and nothing reaches the backend."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest
from fakes.backend import FakeBackend, Turn, hang, respond
from fakes.raw_client import RawClient, post
from fakes.relay_server import RelayServer

from gateway.downstream.settings import DownstreamSettings

OK = b"POST /evil HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\n\r\n{}"

SMUGGLING = {
    "length and coding": b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two equal lengths": b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "two lengths": b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "list of lengths": b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 2, 2\r\n\r\n{}",
    "signed length": b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: +2\r\n\r\n{}",
    "negative length": b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: -2\r\n\r\n{}",
    "hex length": b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 0x2\r\n\r\n{}",
    "space before colon": b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "unknown coding": b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "coding behind chunked": b"POST / HTTP/1.1\r\nHost: t\r\n"
    b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "bare line feeds": b"POST / HTTP/1.1\nHost: t\nContent-Length: 2\n\n{}",
    "folded header": b"POST / HTTP/1.1\r\nHost: t\r\nX: a\r\n b\r\nContent-Length: 2\r\n\r\n{}",
    "no host": b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
    "two hosts": b"POST / HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 2\r\n\r\n{}",
    "nul in a value": b"POST / HTTP/1.1\r\nHost: t\r\nX: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
    "cr in a value": b"POST / HTTP/1.1\r\nHost: t\r\nX: a\rb\r\nContent-Length: 2\r\n\r\n{}",
    "no version": b"POST /\r\nHost: t\r\n\r\n",
    "another protocol": b"GET / RTSP/1.0\r\nHost: t\r\n\r\n",
    "two spaces": b"POST  / HTTP/1.1\r\nHost: t\r\n\r\n",
    "tab in the line": b"POST\t/ HTTP/1.1\r\nHost: t\r\n\r\n",
    "space behind the version": b"POST / HTTP/1.1 \r\nHost: t\r\n\r\n",
    "lower-case method": b"post / HTTP/1.1\r\nHost: t\r\n\r\n",
    "unknown method": b"SMUGGLE / HTTP/1.1\r\nHost: t\r\n\r\n",
    "bare cr before": b"\rGET / HTTP/1.1\r\nHost: t\r\n\r\n",
    "bare lf before": b"\nGET / HTTP/1.1\r\nHost: t\r\n\r\n",
    "bare lf behind a field": b"GET / HTTP/1.1\r\nHost: t\nX: a\r\n\r\n",
    "path without a slash": b"GET a/b HTTP/1.1\r\nHost: t\r\n\r\n",
    "asterisk": b"GET * HTTP/1.1\r\nHost: t\r\n\r\n",
    "absolute without a host": b"GET http:///a HTTP/1.1\r\nHost: t\r\n\r\n",
    "absolute with a bad port": b"GET http://h:99999/a HTTP/1.1\r\nHost: t\r\n\r\n",
    "absolute with a user": b"GET http://u@h/a HTTP/1.1\r\nHost: t\r\n\r\n",
    "coding and length": b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Length: 4\r\n\r\n0\r\n\r\n",
    "coding before chunked": b"POST / HTTP/1.1\r\nHost: t\r\n"
    b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "identity": b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: identity\r\n\r\n",
    "no coding": b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding:\r\n\r\n",
    "quoted coding": b'POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "coding with a parameter": b"POST / HTTP/1.1\r\nHost: t\r\n"
    b"Transfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n",
    "vertical tab before chunked": b"POST / HTTP/1.1\r\nHost: t\r\n"
    b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "chunked in HTTP/1.0": b"POST / HTTP/1.0\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "empty length": b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length:\r\n\r\n",
    "huge length": b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 99999999999999999999\r\n\r\n",
    "field without a colon": b"POST / HTTP/1.1\r\nHost: t\r\nX\r\n\r\n",
    "field without a name": b"POST / HTTP/1.1\r\nHost: t\r\n: a\r\n\r\n",
    "folded first field": b"POST / HTTP/1.1\r\n Host: t\r\n\r\n",
    "tab folds": b"POST / HTTP/1.1\r\nHost: t\r\nX: a\r\n\tb\r\n\r\n",
    "tls on a plain port": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 32,
    "garbage": b"\x00\x01\x02\x03\r\n\r\n",
}

BAD_CHUNKS = {
    "hex prefix": b"0x2\r\n{}\r\n0\r\n\r\n",
    "signed size": b"+2\r\n{}\r\n0\r\n\r\n",
    "negative size": b"-2\r\n{}\r\n0\r\n\r\n",
    "wrong size": b"1\r\n{}\r\n0\r\n\r\n",
    "line feed in an extension": b"2;a\nb\r\n{}\r\n0\r\n\r\n",
    "bare line feeds": b"2\n{}\n0\n\n",
    "huge size": b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n",
}


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    async with FakeBackend() as started:
        yield started


@pytest.fixture
async def server(backend: FakeBackend) -> AsyncIterator[RelayServer]:
    async with RelayServer(backend.base_url) as started:
        yield started


async def refusal_of(server: RelayServer, data: bytes) -> tuple[int, str]:
    """Send `data` with a good request behind it; the one answer must be a JSON error, then the end."""
    async with RawClient(server.port) as client:
        await client.send(data + OK)
        response = await client.read_response()
        assert response.header("content-type") == "application/json"
        assert response.header("connection") == "close"
        error = json.loads(response.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert await client.read_to_end() == b""
    return response.status, str(error["code"])


@pytest.mark.parametrize("name", SMUGGLING)
async def test_smuggling_inputs_are_refused(backend: FakeBackend, server: RelayServer, name: str) -> None:
    """Each ambiguous head gets 400 in JSON and a closed connection; the backend sees no request."""
    assert await refusal_of(server, SMUGGLING[name]) == (400, "invalid_request")
    assert backend.requests == []
    assert len(server.refusals) == 1


@pytest.mark.parametrize(
    "line", [b"POST / HTTP/2.0", b"PRI * HTTP/2.0", b"GET / HTTP/0.9", b"GET / HTTP/1.2", b"POST / HTTP/9.9"]
)
async def test_other_versions_are_told_so(backend: FakeBackend, server: RelayServer, line: bytes) -> None:
    """S11: 505 for what looks like HTTP; nothing behind it is read as a request."""
    data = line + b"\r\nHost: t\r\n\r\n"
    assert await refusal_of(server, data) == (505, "http_version_not_supported")
    assert backend.requests == []


@pytest.mark.parametrize("name", BAD_CHUNKS)
async def test_bad_chunks_never_reach_the_backend(
    backend: FakeBackend, server: RelayServer, name: str
) -> None:
    """A body with broken chunks gets 400 and a closed connection; nothing of it is forwarded."""
    head = b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with RawClient(server.port) as client:
        await client.send(head + BAD_CHUNKS[name] + OK)
        response = await client.read_response()
        assert response.status == 400
        rest = await client.read_to_end()
    assert b" 200 " not in rest
    assert backend.requests == []


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post("/" + "a" * 9_000, b"{}"), 200),
        (post("/", b"{}", "Cookie: " + "c" * 9_000), 200),
        (post("/", b"{}", "Authorization: Bearer " + "t" * 12_000), 200),
        (post("/", b"{}", *(f"x-{i}: {i}" for i in range(150))), 200),
        (post("/" + "a" * 40_000, b"{}"), 431),
        (post("/", b"{}", "Cookie: " + "c" * 40_000), 431),
        (post("/", b"{}", *(f"x-{i}: {i}" for i in range(300))), 431),
        (b"POST / HTTP/1.1\r\nHost: t\r\n" + b"n" * 40_000 + b": 1\r\n\r\n", 431),
    ],
    ids=["long url", "cookie", "jwt", "150 fields", "url over", "field over", "fields over", "name over"],
)
async def test_header_limits(server: RelayServer, data: bytes, status: int) -> None:
    """Default limits pass what agents really send; beyond them 431 in JSON."""
    async with RawClient(server.port) as client:
        await client.send(data)
        response = await client.read_response()
    assert response.status == status
    if status == 431:
        assert json.loads(response.body)["error"]["code"] == "headers_too_large"


async def test_a_head_as_a_whole_is_limited(backend: FakeBackend) -> None:
    """Many fields, each within its own limit, are 431 together."""
    fields = [f"x-{i}: {'v' * 1_000}" for i in range(80)]
    wider = DownstreamSettings(max_head_bytes=100_000)
    for limits, status in ((DownstreamSettings(), 431), (wider, 200)):
        async with (
            RelayServer(backend.base_url, downstream=limits) as server,
            RawClient(server.port) as client,
        ):
            await client.send(post("/", b"{}", *fields))
            assert (await client.read_response()).status == status


async def test_limits_are_configurable(backend: FakeBackend) -> None:
    """Smaller limits refuse what the defaults pass; a whole that is smaller than its parts is a mistake."""
    with pytest.raises(ValueError, match="max_head_bytes"):
        DownstreamSettings(max_header_field_bytes=100_000)
    limits = DownstreamSettings(max_header_field_bytes=300, max_headers=10, max_request_line_bytes=300)
    async with RelayServer(backend.base_url, downstream=limits) as server:
        for data in (
            post("/", b"{}", "X: " + "c" * 400),
            post("/", b"{}", *(f"x-{i}: {i}" for i in range(12))),
            post("/" + "a" * 400, b"{}"),
        ):
            async with RawClient(server.port) as client:
                await client.send(data)
                assert (await client.read_response()).status == 431


async def test_refusal_is_read_although_the_client_still_sends(server: RelayServer) -> None:
    """A client in the middle of a long send still reads why it was refused: no reset destroys the answer."""
    async with RawClient(server.port) as client:
        client.writer.write(b"POST / HTTP/1.1\r\nHost: t\r\nX: " + b"y" * 8_000_000)
        response = await client.read_response()
    assert response.status == 431


async def test_slow_head_is_cut_off(backend: FakeBackend) -> None:
    """A head that drips longer than the keep-alive timeout is told so, and loses its connection."""
    limits = DownstreamSettings(keep_alive_timeout_s=0.2)
    async with RelayServer(backend.base_url, downstream=limits) as server, RawClient(server.port) as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: t\r\nX: ")
        assert (await client.read_response(timeout_s=3)).status == 408
        assert await client.read_to_end() == b""


async def test_idle_connection_is_closed(backend: FakeBackend) -> None:
    """A connection that waits longer than the keep-alive timeout between two requests is closed."""
    limits = DownstreamSettings(keep_alive_timeout_s=0.2)
    async with RelayServer(backend.base_url, downstream=limits) as server, RawClient(server.port) as client:
        await client.send(post("/", b"{}"))
        assert (await client.read_response()).status == 200
        assert await client.read_to_end(timeout_s=3) == b""


async def test_connection_close_of_the_client_is_obeyed(server: RelayServer) -> None:
    """`Connection: close` in a request ends the connection after its answer, and the answer says so."""
    async with RawClient(server.port) as client:
        await client.send(post("/", b"{}", "Connection: close"))
        response = await client.read_response()
        assert response.header("connection") == "close"
        assert await client.read_to_end() == b""


async def test_http10_keep_alive(server: RelayServer) -> None:
    """An HTTP/1.0 client that asks for keep-alive gets it, and is told."""
    async with RawClient(server.port) as client:
        await client.send(post("/", b"{}", "Connection: keep-alive", version="1.0"))
        assert (await client.read_response()).header("connection") == "keep-alive"
        await client.send(post("/", b"{}", version="1.0"))
        assert (await client.read_response()).header("connection") == "close"


async def test_flood_of_pipelined_requests_is_bounded(backend: FakeBackend, server: RelayServer) -> None:
    """Requests pipelined behind a hanging one are not all taken in; they are answered once it ends."""
    gate = asyncio.Event()

    async def wait(turn: Turn) -> None:
        await gate.wait()
        await respond(b"late")(turn)

    backend.script(wait)
    backend.default = respond(b"ok")
    async with RawClient(server.port) as client:
        client.writer.write(post("/", b"{}") * 1000)
        await backend.wait_until(lambda b: len(b.requests) == 1)
        assert len(server.bodies) == 1
        gate.set()
        assert (await client.read_response()).body == b"late"
        for _ in range(999):
            assert (await client.read_response()).body == b"ok"


async def test_handler_failure_is_a_500_in_json(backend: FakeBackend) -> None:
    """An exception nobody foresaw becomes a JSON 500 that tells nothing of its cause."""
    async with RelayServer(backend.base_url) as server:
        server.failure = RuntimeError("secret detail")
        async with RawClient(server.port) as client:
            await client.send(post("/", b"{}"))
            response = await client.read_response()
    assert response.status == 500
    assert json.loads(response.body)["error"]["code"] == "internal_error"
    assert b"secret" not in response.body


async def test_sockets_have_nodelay_and_notice_lost_peers(backend: FakeBackend, server: RelayServer) -> None:
    """Both sides send small events at once and give up on a peer whose network vanished."""
    seen: list[tuple[int, int]] = []

    async def look(turn: Turn) -> None:
        transports = [connection.transport for connection in server.connections]
        # no public member leads to the upstream's socket
        transports += [connection._transport for connection in server.pool._connections]
        seen.extend(_options(transport.get_extra_info("socket")) for transport in transports if transport)
        await respond(b"{}")(turn)

    backend.script(look)
    async with RawClient(server.port) as client:
        await client.send(post("/", b"{}"))
        await client.read_response()
    assert sorted(seen) == [(1, 60_000), (1, 120_000)]


def _options(sock: socket.socket) -> tuple[int, int]:
    nodelay = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    return nodelay, sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


async def test_client_without_a_place_is_told(backend: FakeBackend) -> None:
    """One connection more than `max_connections` gets 503 in JSON, also when it sends its request at once and
    in many pieces; a place that becomes free serves the next."""
    settings = DownstreamSettings(max_connections=1)
    async with RelayServer(backend.base_url, downstream=settings) as server:
        async with RawClient(server.port) as first:
            await first.send(post("/", b"{}"))
            assert (await first.read_response()).status == 200
            async with RawClient(server.port) as second:
                second.writer.write(post("/", b"x" * 1_000_000))
                response = await second.read_response()
                assert (response.status, response.header("retry-after")) == (503, "1")
                assert json.loads(response.body)["error"]["code"] == "overloaded"
            await first.send(post("/", b"{}"))
            assert (await first.read_response()).status == 200
        while server.connections:
            await asyncio.sleep(0)
        async with RawClient(server.port) as third:
            await third.send(post("/", b"{}"))
            assert (await third.read_response()).status == 200
    assert [refusal.status for refusal in server.refusals] == [503]


async def test_shutdown_waits_for_nobody_idle(backend: FakeBackend) -> None:
    """Stopping the server with an idle connection and a hanging request ends both and leaks nothing."""
    backend.script(hang())
    server = RelayServer(backend.base_url)
    await server.start()
    async with RawClient(server.port), RawClient(server.port) as busy:
        await busy.send(post("/", b"{}"))
        await backend.wait_until(lambda b: len(b.requests) == 1)
        await server.stop()
        assert await busy.read_to_end() == b""
    assert server.num_in_flight == 0
