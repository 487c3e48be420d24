"""Clients that send FIN or RST: the gone ones free their backend at once, the half-closed ones are served.

Both send the same FIN; what tells them apart is the answer of their kernel to a probe, so these tests need
real sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fakes.backend import FakeBackend, Turn, hang, respond, stream
from fakes.raw_client import RawClient, post
from fakes.relay_server import RelayServer

from gateway.downstream.half_close import PROBE_DELAYS_S
from gateway.downstream.settings import DownstreamSettings

DETECTION_S = 0.1  # the promise: an engine is freed within this time


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    async with FakeBackend() as started:
        yield started


@pytest.fixture
async def server(backend: FakeBackend) -> AsyncIterator[RelayServer]:
    async with RelayServer(backend.base_url) as started:
        yield started


class Late:
    """A backend that answers when told."""

    def __init__(self, body: bytes = b"late") -> None:
        self.gate = asyncio.Event()
        self._body = body

    async def __call__(self, turn: Turn) -> None:
        await self.gate.wait()
        await respond(self._body)(turn)


@pytest.mark.parametrize("how", ["leave", "reset"])
@pytest.mark.parametrize("phase", ["prefill", "head only", "mid-stream"])
async def test_gone_client_frees_a_silent_backend(
    backend: FakeBackend, server: RelayServer, phase: str, how: str
) -> None:
    """Closed or reset, before the head, after it, or between events: the engine knows within 100 ms."""
    behaviours = {
        "prefill": hang(),
        "head only": stream(then="wait"),
        "mid-stream": stream(b"data: 1\n\n", then="wait"),
    }
    backend.script(behaviours[phase])
    async with RawClient(server.port) as client:
        await client.send(post("/", b"{}"))
        await backend.wait_until(lambda b: len(b.requests) == 1)
        if phase != "prefill":
            await client.read_head()
        if phase == "mid-stream":
            await client.read_chunk()
        if how == "leave":
            await client.leave()
        else:
            client.reset()
        await backend.wait_until(lambda b: b.num_cancelled == 1, timeout_s=DETECTION_S)
    await server.wait_idle()
    assert server.pool.stats().num_active == 0
    assert server.num_cancelled == 1


async def test_gone_client_mid_event_frees_the_backend_at_the_next_bytes(
    backend: FakeBackend, server: RelayServer
) -> None:
    """Inside an event no comment may be sent; the next two reads of the backend show that the client left."""
    gates = {1: asyncio.Event(), 2: asyncio.Event()}
    backend.script(stream(b"data: ha", b"lf", b"\n\n", gates=gates, then="wait"))
    async with RawClient(server.port) as client:
        await client.send(post("/", b"{}"))
        await client.read_head()
        await client.read_chunk()
        await client.leave()
        gates[1].set()
        await asyncio.sleep(0.02)  # the reset needs a moment on the wire
        gates[2].set()
        await backend.wait_until(lambda b: b.num_cancelled == 1, timeout_s=1)


async def test_half_closed_client_is_served(backend: FakeBackend, server: RelayServer) -> None:
    """FIN during prefill: the whole answer comes, after at most five interim ones, then the end."""
    late = Late()
    backend.script(late)
    async with RawClient(server.port) as client:
        await client.send(post("/", b"{}"))
        await backend.wait_until(lambda b: len(b.requests) == 1)
        client.half_close()
        await asyncio.sleep(sum(PROBE_DELAYS_S) + 0.2)  # longer than all probes
        late.gate.set()
        response = await client.read_response()
        assert response.num_interim == len(PROBE_DELAYS_S)
        assert (response.status, response.body) == (200, b"late")
        assert await client.read_to_end() == b""
    assert backend.num_cancelled == 0


async def test_fin_in_the_same_segment_as_the_request(backend: FakeBackend, server: RelayServer) -> None:
    """`printf request | nc -N`: FIN right behind the request, before its handler runs."""
    backend.script(respond(b"served"))
    async with RawClient(server.port) as client:
        client.writer.write(post("/", b"{}"))
        client.half_close()
        response = await client.read_response()
        assert response.body == b"served"
        assert await client.read_to_end() == b""


async def test_pipelined_requests_before_the_fin_are_all_served(
    backend: FakeBackend, server: RelayServer
) -> None:
    """Two requests, then FIN: two answers, then the end."""
    late = Late(b"first")
    backend.script(late, respond(b"second"))
    async with RawClient(server.port) as client:
        await client.send(post("/", b"1") + post("/", b"2"))
        await backend.wait_until(lambda b: len(b.requests) == 1)
        client.half_close()
        late.gate.set()
        assert (await client.read_response()).body == b"first"
        assert (await client.read_response()).body == b"second"
        assert await client.read_to_end() == b""


async def test_half_closed_stream_gets_every_event(backend: FakeBackend, server: RelayServer) -> None:
    """FIN inside an event stream: only comments are added, and only between events."""
    gate = asyncio.Event()
    events = [b"data: 1\n\n", b"data: ha", b"lf\n\n"]
    backend.script(stream(*events, gates={1: gate}))
    async with RawClient(server.port) as client:
        await client.send(post("/", b"{}"))
        await client.read_head()
        assert await client.read_chunk() == events[0]
        client.half_close()
        assert await client.read_chunk() == b":\n"
        gate.set()
        pieces = []
        while piece := await client.read_chunk():
            pieces.append(piece)
        assert await client.read_to_end() == b""
    body = b"".join(pieces)
    assert body.replace(b":\n\n", b"") == b"data: half\n\n"
    assert body.endswith(b"data: half\n\n")


async def test_http10_fin_means_gone(backend: FakeBackend, server: RelayServer) -> None:
    """HTTP/1.0 allows no interim answer to probe with: FIN cancels (nginx talks 1.0 to its upstreams)."""
    backend.script(hang())
    async with RawClient(server.port) as client:
        await client.send(post("/", b"{}", version="1.0"))
        await backend.wait_until(lambda b: len(b.requests) == 1)
        client.half_close()
        await backend.wait_until(lambda b: b.num_cancelled == 1, timeout_s=DETECTION_S)


async def test_probing_can_be_switched_off(backend: FakeBackend) -> None:
    """`probe_half_closed: false` takes each FIN for a client that has gone."""
    backend.script(hang())
    settings = DownstreamSettings(probe_half_closed=False)
    async with RelayServer(backend.base_url, downstream=settings) as server, RawClient(server.port) as client:
        await client.send(post("/", b"{}"))
        await backend.wait_until(lambda b: len(b.requests) == 1)
        client.half_close()
        await backend.wait_until(lambda b: b.num_cancelled == 1, timeout_s=DETECTION_S)
        assert await client.read_to_end() == b""


async def test_idle_connection_ends_at_fin(server: RelayServer) -> None:
    """FIN between requests closes at once."""
    async with RawClient(server.port) as client:
        await client.send(post("/", b"{}"))
        await client.read_response()
        client.half_close()
        assert await client.read_to_end(timeout_s=1) == b""


async def test_client_that_never_reads_is_cut_off(backend: FakeBackend) -> None:
    """A client that takes nothing for `write_stall_timeout_s` loses its connection and frees the backend."""
    backend.script(stream(*[b"x" * 1_000_000] * 40, then="wait"))
    settings = DownstreamSettings(write_stall_timeout_s=0.2)
    async with RelayServer(backend.base_url, downstream=settings) as server, RawClient(server.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # it reads, too
        await client.send(post("/", b"{}"))
        await server.wait_idle(timeout_s=5)
        await backend.wait_until(lambda b: b.num_open == 0)
        client.reset()
