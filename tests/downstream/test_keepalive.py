"""Comments in silent event streams: where they may stand, and where nothing may be added."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fakes.backend import STREAM_HEAD, Behaviour, FakeBackend, Turn, chunk, respond, stream
from fakes.raw_client import RawClient, post
from fakes.relay_server import RelayServer

from gateway.config.config import ConfigError, parse_config
from gateway.downstream.relay import SSE_COMMENT
from gateway.downstream.settings import DownstreamSettings

LIMIT_S = 0.1
SEVERAL_LIMITS_S = 0.35  # the absence of comments can only be shown by waiting for them


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    async with FakeBackend() as started:
        yield started


@pytest.fixture
async def server(backend: FakeBackend) -> AsyncIterator[RelayServer]:
    async with RelayServer(
        backend.base_url, downstream=DownstreamSettings(sse_keepalive_s=LIMIT_S)
    ) as started:
        yield started


async def _nothing_comes(client: RawClient) -> bool:
    try:
        async with asyncio.timeout(SEVERAL_LIMITS_S):
            await client.reader.readexactly(1)
    except TimeoutError:
        return True
    return False


async def test_a_silent_stream_gets_comments_between_its_events(
    backend: FakeBackend, server: RelayServer
) -> None:
    """Before the first event (a long prefill) and between two; every event arrives whole, and the end."""
    gates = {0: asyncio.Event(), 1: asyncio.Event()}
    backend.script(stream(b"data: 1\n\n", b"data: 2\n\n", gates=gates))
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        assert (await client.read_head())[0] == 200
        chunks = []
        for gate in gates.values():
            chunks += [await client.read_chunk() for _ in range(3)]
            assert set(chunks[-3:]) == {SSE_COMMENT}
            gate.set()
            while chunks[-1] == SSE_COMMENT:
                chunks.append(await client.read_chunk())
        assert [one for one in chunks if one != SSE_COMMENT] == [b"data: 1\n\n", b"data: 2\n\n"]
        assert await client.read_chunk() == b""


def _after(gate: asyncio.Event, first: bytes, second: bytes) -> Behaviour:
    """Send `first`, wait, send `second`."""

    async def behave(turn: Turn) -> None:
        await turn.send(first)
        await gate.wait()
        await turn.send(second)

    return behave


async def test_a_decoder_that_dispatches_at_each_blank_line_reads_the_events(
    backend: FakeBackend, server: RelayServer
) -> None:
    """N17: a comment with a blank line behind it was an event without data, and an error."""
    gates = {0: asyncio.Event(), 1: asyncio.Event()}
    backend.script(stream(b"data: 1\n\n", b"data: 2\n\n", gates=gates))
    text, num_comments = b"", 0
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        await client.read_head()
        while piece := await client.read_chunk():
            text += piece
            num_comments += piece.startswith(b":")
            if num_comments >= 2:
                gates[0].set()
            if num_comments >= 4:
                gates[1].set()
    assert num_comments >= 4
    assert _events_at_blank_lines(text) == [b"1", b"2"]


def _events_at_blank_lines(text: bytes) -> list[bytes]:
    """As clients in use decode: what stands before an empty line is an event, whether it has data or not."""
    events, data = [], b""
    for line in text.split(b"\n")[:-1]:
        if not line:
            events.append(data)
            data = b""
        elif line.startswith(b"data: "):
            data = line.removeprefix(b"data: ")
    return events


async def test_no_event_is_cut_by_a_comment(backend: FakeBackend, server: RelayServer) -> None:
    """A backend that is silent inside an event is left alone."""
    gate = asyncio.Event()
    head = STREAM_HEAD + chunk(b"data: hal")
    backend.script(_after(gate, head, chunk(b"f\n\n") + b"0\r\n\r\n"))
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        await client.read_head()
        assert await client.read_chunk() == b"data: hal"
        assert await _nothing_comes(client)
        gate.set()
        assert await client.read_chunk() == b"f\n\n"


async def test_only_event_streams_that_have_begun_get_comments(
    backend: FakeBackend, server: RelayServer
) -> None:
    """Not after the end of a stream, not before an answer's head, and not inside JSON."""
    gate = asyncio.Event()
    backend.script(stream(b"data: 1\n\n"), _gated(gate, respond(b"{}")))
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        assert (await client.read_response()).body == b"data: 1\n\n"
        assert await _nothing_comes(client)
        await client.send(post("/a", b"{}"))
        assert await _nothing_comes(client)
        gate.set()
        assert (await client.read_response()).body == b"{}"


def _gated(gate: asyncio.Event, behaviour: Behaviour) -> Behaviour:
    async def behave(turn: Turn) -> None:
        await gate.wait()
        await behaviour(turn)

    return behave


async def test_a_client_that_leaves_ends_the_comments(backend: FakeBackend, server: RelayServer) -> None:
    """Nobody writes to a connection that is gone, and the backend is free."""
    backend.script(stream(b"data: 1\n\n", gates={0: asyncio.Event()}))
    async with RawClient(server.port) as client:
        await client.send(post("/a", b"{}"))
        await client.read_head()
        assert await client.read_chunk() == SSE_COMMENT
    await server.wait_idle()
    assert server.num_cancelled == 1


def test_the_limit_must_leave_time() -> None:
    """A limit of nothing would send comments without end."""
    with pytest.raises(ConfigError, match="sse_keepalive_s"):
        parse_config({"downstream": {"sse_keepalive_s": 0}})
