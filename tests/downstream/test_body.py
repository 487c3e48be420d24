"""Reading request bodies: sizes, framings, expectations, and clients that stall."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from fakes.backend import FakeBackend, respond
from fakes.raw_client import RawClient, post
from fakes.relay_server import RelayServer

from gateway.downstream.settings import DownstreamSettings

CHUNKED = b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMITS = DownstreamSettings(max_body_bytes=1_000, body_idle_timeout_s=0.2)


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    async with FakeBackend(default=respond(b"{}")) as started:
        yield started


@pytest.fixture
async def server(backend: FakeBackend) -> AsyncIterator[RelayServer]:
    async with RelayServer(backend.base_url, downstream=LIMITS) as started:
        yield started


async def test_chunked_upload_is_joined(backend: FakeBackend, server: RelayServer) -> None:
    """A chunked body arrives whole, with a length; trailers are dropped."""
    async with RawClient(server.port) as client:
        await client.send(CHUNKED + b"3\r\nabc\r\n")
        await client.send(b"4;name=value\r\ndefg\r\n0\r\nx-trailer: 1\r\n\r\n")
        assert (await client.read_response()).status == 200
    assert backend.requests[0].body == b"abcdefg"
    assert backend.requests[0].header("x-trailer") is None


async def test_body_in_any_pieces_arrives_the_same(backend: FakeBackend, server: RelayServer) -> None:
    """A body cut at each byte is the same body."""
    body = b'{"model": "m"}'
    request = post("/", body)
    async with RawClient(server.port) as client:
        for cut in range(1, len(request)):
            await client.send(request[:cut])
            await asyncio.sleep(0)
            await client.send(request[cut:])
            assert (await client.read_response()).status == 200
    assert server.bodies == [body] * (len(request) - 1)


@pytest.mark.parametrize("size", [0, 1, 999, 1_000])
async def test_bodies_up_to_the_limit_pass(backend: FakeBackend, server: RelayServer, size: int) -> None:
    """The limit itself is allowed, sized and chunked."""
    async with RawClient(server.port) as client:
        await client.send(post("/", b"x" * size))
        assert (await client.read_response()).status == 200
        chunk = b"%x\r\n%b\r\n" % (size, b"x" * size) if size else b""
        await client.send(CHUNKED + chunk + b"0\r\n\r\n")
        assert (await client.read_response()).status == 200
    assert [len(request.body) for request in backend.requests] == [size, size]


@pytest.mark.parametrize(
    "request_bytes",
    [post("/", b"x" * 1_001), CHUNKED + b"3e9\r\n" + b"x" * 1_001 + b"\r\n0\r\n\r\n"],
    ids=["sized", "chunked"],
)
async def test_one_byte_more_is_413(backend: FakeBackend, server: RelayServer, request_bytes: bytes) -> None:
    """Limit + 1 is refused and nothing is forwarded."""
    async with RawClient(server.port) as client:
        await client.send(request_bytes)
        response = await client.read_response()
    assert (response.status, response.body) == (413, b"request_too_large")
    assert backend.requests == []


async def test_declared_length_over_the_limit_is_refused_unread(server: RelayServer) -> None:
    """A length over the limit is refused before the body is sent; the answer survives the upload."""
    async with RawClient(server.port) as client:
        client.writer.write(post("/", b"x" * 3_000_000))
        assert (await client.read_response()).status == 413


async def test_expect_continue_invites_the_body(backend: FakeBackend, server: RelayServer) -> None:
    """A client that waits for 100 gets it, once, before it sends."""
    async with RawClient(server.port) as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert (await client.read_head())[0] == 100
        await client.send(b"{}")
        response = await client.read_response()
    assert (response.status, response.num_interim) == (200, 0)
    assert backend.requests[0].body == b"{}"


async def test_expect_continue_over_the_limit_is_refused(server: RelayServer) -> None:
    """No invitation for a body that would be refused."""
    async with RawClient(server.port) as client:
        await client.send(
            b"POST / HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 2000\r\n\r\n"
        )
        response = await client.read_response()
    assert (response.status, response.num_interim) == (413, 0)


async def test_no_invitation_for_a_body_that_is_here(server: RelayServer) -> None:
    """A client that did not wait gets no 100."""
    async with RawClient(server.port) as client:
        await client.send(post("/", b"{}", "Expect: 100-continue"))
        response = await client.read_response()
    assert (response.status, response.num_interim) == (200, 0)


async def test_unknown_expectation_is_417(server: RelayServer) -> None:
    """Nothing else can be expected."""
    async with RawClient(server.port) as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: t\r\nExpect: miracles\r\nContent-Length: 2\r\n\r\n")
        assert (await client.read_response()).status == 417


async def test_stalled_body_is_408(server: RelayServer) -> None:
    """No byte of the body for `body_idle_timeout_s`: refused."""
    async with RawClient(server.port) as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 20\r\n\r\n{")
        assert (await client.read_response()).status == 408
    await server.wait_idle()


async def test_trickling_body_is_408(backend: FakeBackend) -> None:
    """Bytes that keep coming, but too slowly, are refused once the idle timeout has passed."""
    limits = DownstreamSettings(body_idle_timeout_s=0.1, body_min_bytes_per_s=1_000)
    async with RelayServer(backend.base_url, downstream=limits) as server, RawClient(server.port) as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 1000\r\n\r\n")
        answer = asyncio.create_task(client.read_response())
        while not answer.done():
            client.writer.write(b"x")
            await asyncio.wait((answer,), timeout=0.02)
        assert answer.result().status == 408


async def test_client_that_leaves_during_upload(backend: FakeBackend, server: RelayServer) -> None:
    """FIN or RST inside a body cancels the handler; nothing is forwarded."""
    for leave in ("fin", "rst"):
        async with RawClient(server.port) as client:
            await client.send(b"POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 20\r\n\r\n{")
            while server.num_in_flight == 0:
                await asyncio.sleep(0)
            if leave == "fin":
                client.half_close()
            else:
                client.reset()
            await server.wait_idle(timeout_s=1)
    assert server.num_cancelled == 2
    assert backend.requests == []


async def test_large_body_takes_constant_factor_memory(backend: FakeBackend) -> None:
    """A 16 MiB upload peaks at less than three times its size, in and out."""
    size = 1 << 24
    async with RelayServer(backend.base_url) as server, RawClient(server.port) as client:
        request = post("/", b"x" * size)
        tracemalloc.start()
        try:
            answer = asyncio.create_task(client.read_response())
            for start in range(0, len(request), 1 << 18):
                await client.send(request[start : start + (1 << 18)])
            assert (await answer).status == 200
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        server.bodies.clear()
    # The fake backend in this process holds one copy, and its reader's buffer another.
    assert peak < (3 + 2.2) * size
