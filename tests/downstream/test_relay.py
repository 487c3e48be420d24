"""The two socket sides together: what a raw client receives for what a backend sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest
from fakes.backend import STREAM_HEAD, FakeBackend, Turn, chunk, hang, raw, respond, stream
from fakes.raw_client import RawClient, post
from fakes.relay_server import RelayServer


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    async with FakeBackend() as started:
        yield started


@pytest.fixture
async def server(backend: FakeBackend) -> AsyncIterator[RelayServer]:
    async with RelayServer(backend.base_url) as started:
        yield started


async def test_sized_answer_keeps_its_length(backend: FakeBackend, server: RelayServer) -> None:
    """`content-length` stays, the body is untouched, the connection serves a second request."""
    backend.script(respond(b"hello", headers=(("x-engine", "fake"),)), respond(b"again"))
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"1"))
        first = await client.read_response()
        await client.send(post("/a", b"2"))
        second = await client.read_response()
    assert (first.status, first.body, first.header("content-length")) == (200, b"hello", "5")
    assert first.header("x-engine") == "fake"
    assert first.header("transfer-encoding") is None
    assert second.body == b"again"
    assert server.bodies == [b"1", b"2"]


async def test_events_are_forwarded_one_by_one(backend: FakeBackend, server: RelayServer) -> None:
    """Each event reaches the client before the backend sends the next one."""
    gates = {1: asyncio.Event(), 2: asyncio.Event()}
    events = [b"data: %d\n\n" % i for i in range(3)]
    backend.script(stream(*events, gates=gates))
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        status, _, headers = await client.read_head()
        assert status == 200
        assert ("transfer-encoding", "chunked") in headers
        assert await client.read_chunk() == events[0]
        gates[1].set()
        assert await client.read_chunk() == events[1]
        gates[2].set()
        assert await client.read_chunk() == events[2]
        assert await client.read_chunk() == b""


async def test_head_alone_is_forwarded_at_once(backend: FakeBackend, server: RelayServer) -> None:
    """A head that comes long before its body does not wait for it."""
    gate = asyncio.Event()
    backend.script(stream(b"data: 1\n\n", gates={0: gate}))
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        assert (await client.read_head())[0] == 200
        gate.set()
        assert await client.read_chunk() == b"data: 1\n\n"


async def test_close_delimited_answer_becomes_chunked(backend: FakeBackend, server: RelayServer) -> None:
    """A body without length gets a detectable end, and the client's connection stays open."""
    backend.script(raw(b"HTTP/1.1 200 OK\r\n\r\nto the end", then="close"))
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        response = await client.read_response()
        assert (response.body, response.is_complete) == (b"to the end", True)
        assert response.header("transfer-encoding") == "chunked"
        await client.send(post("/a", b"{}"))
        assert (await client.read_response()).status == 200


async def test_http10_client_gets_a_plain_body(backend: FakeBackend, server: RelayServer) -> None:
    """HTTP/1.0 knows no chunks: the body ends with the connection."""
    backend.script(stream(b"data: 1\n\n", b"data: 2\n\n"))
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}", version="1.0"))
        response = await client.read_response()
    assert response.body == b"data: 1\n\ndata: 2\n\n"
    assert response.header("connection") == "close"
    assert response.header("transfer-encoding") is None


async def test_head_answer_has_no_body(backend: FakeBackend, server: RelayServer) -> None:
    """The answer to HEAD names the length and sends nothing."""
    backend.script(respond(b"12345"), respond(b"next"))
    async with RawClient(server.port) as client:
        await client.send(b"HEAD /a HTTP/1.1\r\nHost: t\r\n\r\n")
        response = await client.read_response(method="HEAD")
        assert response.header("content-length") == "5"
        await client.send(post("/a", b"{}"))
        assert (await client.read_response()).body == b"next"


async def test_pipelined_requests_are_answered_in_order(backend: FakeBackend, server: RelayServer) -> None:
    """Three requests in one segment get three answers in order."""
    backend.script(respond(b"one"), stream(b"two"), respond(b"three"))
    async with RawClient(server.port) as client:
        await client.send(b"".join(post("/a", body) for body in (b"1", b"2", b"3")))
        bodies = [(await client.read_response()).body for _ in range(3)]
    assert bodies == [b"one", b"two", b"three"]
    assert server.bodies == [b"1", b"2", b"3"]


async def test_cut_stream_gets_an_error_event_and_no_end(backend: FakeBackend, server: RelayServer) -> None:
    """A backend that dies mid-stream: what came, an in-band error, and a connection that ends uncleanly."""
    backend.script(stream(b"data: 1\n\n", then="reset"))
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        response = await client.read_response()
    assert response.chunks[0] == b"data: 1\n\n"
    assert response.chunks[-1] == b'data: {"error": "upstream_truncated"}\n\n'
    assert not response.is_complete


async def test_cut_sized_answer_is_short(backend: FakeBackend, server: RelayServer) -> None:
    """A sized body that ends early stays short: no byte is added to it."""
    backend.script(raw(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n12345", then="close"))
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        response = await client.read_response()
    assert (response.body, response.is_complete) == (b"12345", False)


async def test_client_that_resets_cancels_the_backend(backend: FakeBackend, server: RelayServer) -> None:
    """RST during prefill reaches the engine within 100 ms."""
    backend.script(hang())
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        await backend.wait_until(lambda b: len(b.requests) == 1)
        client.reset()
        await backend.wait_until(lambda b: b.num_cancelled == 1, timeout_s=0.1)
    await server.wait_idle()
    assert server.num_cancelled == 1
    assert server.pool.stats().num_active == 0


async def test_client_that_leaves_cancels_a_silent_backend(backend: FakeBackend, server: RelayServer) -> None:
    """A plain close during prefill reaches the engine within 100 ms, though it looks like a half-close."""
    backend.script(hang())
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        await backend.wait_until(lambda b: len(b.requests) == 1)
        await client.leave()
        await backend.wait_until(lambda b: b.num_cancelled == 1, timeout_s=0.1)
    await server.wait_idle()
    assert server.pool.stats().num_active == 0


async def test_client_that_leaves_mid_stream_cancels(backend: FakeBackend, server: RelayServer) -> None:
    """A close between two events of a stream reaches a silent engine within 100 ms."""
    backend.script(stream(b"data: 1\n\n", then="wait"))
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        await client.read_head()
        await client.read_chunk()
        await client.leave()
        await backend.wait_until(lambda b: b.num_cancelled == 1, timeout_s=0.1)
    await server.wait_idle()


async def test_half_closed_client_gets_its_answer(backend: FakeBackend, server: RelayServer) -> None:
    """A client that only finished sending is served in full, then the connection ends."""
    gate = asyncio.Event()

    async def late(turn: Turn) -> None:
        await gate.wait()
        await respond(b"late answer")(turn)

    backend.script(late)
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        await backend.wait_until(lambda b: len(b.requests) == 1)
        client.half_close()
        await client.reader.readuntil(b"100 Continue\r\n\r\n")
        await client.reader.readuntil(b"100 Continue\r\n\r\n")
        gate.set()
        response = await client.read_response()
        assert response.body == b"late answer"
        assert await client.read_to_end() == b""


async def test_half_closed_stream_goes_on(backend: FakeBackend, server: RelayServer) -> None:
    """A half-close inside an event stream adds comments at most; every event arrives."""
    gate = asyncio.Event()
    backend.script(stream(b"data: 1\n\n", b"data: 2\n\n", gates={1: gate}))
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        await client.read_head()
        assert await client.read_chunk() == b"data: 1\n\n"
        client.half_close()
        assert await client.read_chunk() == b":\n"
        gate.set()
        rest = [piece async for piece in _chunks(client)]
    assert b"".join(rest).replace(b":\n\n", b"", 5).endswith(b"data: 2\n\n")


async def test_slow_client_holds_the_backend_back(backend: FakeBackend, server: RelayServer) -> None:
    """A client that does not read stops the flow; when it reads, all bytes arrive."""
    piece = b"x" * 65_536
    num_pieces = 512
    sent: list[int] = []
    all_sent = asyncio.Event()

    async def flood(turn: Turn) -> None:
        await turn.send(STREAM_HEAD)
        for index in range(num_pieces):
            await turn.send(chunk(piece))
            sent.append(index)
        await turn.send(b"0\r\n\r\n")
        all_sent.set()

    backend.script(flood)
    async with RawClient(server.port) as client:
        transport = cast(asyncio.Transport, client.writer.transport)
        transport.pause_reading()
        await client.send(post("/a", b"{}"))
        await backend.wait_until(lambda b: len(b.requests) == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(all_sent.wait(), 0.3)
        transport.resume_reading()
        response = await client.read_response()
    assert len(response.body) == num_pieces * len(piece)
    assert response.is_complete


async def _chunks(client: RawClient) -> AsyncIterator[bytes]:
    while data := await client.read_chunk():
        yield data
