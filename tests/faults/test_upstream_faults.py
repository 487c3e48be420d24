"""Every way in which a backend can fail, in every dialect, streamed or not, over the whole gateway.

One backend only, so nothing can be cured by another: the client must get the right status or the right
in-band error, never a hang, never something that looks complete, and nothing may be left behind.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any

import pytest
from fakes.backend import STREAM_HEAD, Behaviour, Turn, chunk, raw, respond
from fakes.dialects import CASE_IDS, CASES, DIALECTS, Dialect
from fakes.gateway_world import FAST_HEALTH, GatewayWorld
from fakes.leaks import LeakCheck
from fakes.raw_client import RawClient, RawResponse, post

NEVER_EJECT = {**FAST_HEALTH, "unhealthy_after": 1_000_000}
# Only for faults that are silences: elsewhere a busy machine would be taken for one.
IMPATIENT = {"first_byte_timeout_s": 0.25, "idle_timeout_s": 0.25}
SILENCES = {"silence", "slow-loris", "wait"}
SIZED_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 40\r\n\r\n"
EVENT = b'data: {"x":1}\n\n'


@asynccontextmanager
async def one_backend(**config: Any) -> AsyncIterator[GatewayWorld]:
    """Keeps no idle connections: a reset of a reused one would be cured by a fresh one (see B31 below)."""
    upstream = {"max_idle_connections": 0, **config}
    async with GatewayWorld(1, health=NEVER_EJECT, upstream=upstream) as world:
        yield world


async def ask(world: GatewayWorld, dialect: Dialect, *, stream: bool) -> RawResponse:
    async with RawClient(world.gateway.port) as client:
        body = dialect.encode(stream=stream)
        await client.send(post(dialect.path, body, "Content-Type: application/json", "x-session-id: s"))
        return await client.read_response(timeout_s=5)


async def drip(turn: Turn) -> None:
    """A head that never ends, one byte at a time."""
    for number in range(10_000):
        await turn.send(b"HTTP/1.1 200 OK\r\nx: "[number : number + 1] or b"y")
        await asyncio.sleep(0.01)


BEFORE_THE_HEAD: dict[str, tuple[Behaviour, int, str]] = {
    "reset before an answer": (raw(b"", "reset"), 502, "upstream_reset"),
    "close before an answer": (raw(b"", "close"), 502, "upstream_reset"),
    "reset inside the head": (raw(b"HTTP/1.1 200 OK\r\nx: y", "reset"), 502, "upstream_reset"),
    "close inside the head": (raw(b"HTTP/1.1 200 OK\r\nx: y", "close"), 502, "upstream_reset"),
    "only an interim answer": (raw(b"HTTP/1.1 100 Continue\r\n\r\n", "close"), 502, "upstream_reset"),
    "garbage": (raw(b"\x00\x01\x02garbage\r\n\r\n", "wait"), 502, "upstream_protocol_error"),
    "another protocol": (raw(b"SSH-2.0-OpenSSH_9.0\r\n", "wait"), 502, "upstream_protocol_error"),
    "oversized head": (
        raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", "wait"),
        502,
        "upstream_protocol_error",
    ),
    "too many fields": (
        raw(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 400 + b"\r\n", "wait"),
        502,
        "upstream_protocol_error",
    ),
    "two lengths": (
        raw(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", "wait"),
        502,
        "upstream_protocol_error",
    ),
    "length and chunks": (
        raw(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", "wait"),
        502,
        "upstream_protocol_error",
    ),
    "silence": (raw(b"", "wait"), 504, "upstream_timeout"),
    "slow-loris": (drip, 504, "upstream_timeout"),
}

ANTHROPIC_TYPES = {502: "api_error", 503: "overloaded_error", 504: "timeout_error"}


@pytest.mark.parametrize("fault", BEFORE_THE_HEAD)
async def test_faults_before_the_head(fault: str) -> None:
    """The status names the fault, the body is an error of the dialect, and nobody tries twice."""
    behaviour, status, code = BEFORE_THE_HEAD[fault]
    async with one_backend(**(IMPATIENT if fault in SILENCES else {})) as world:
        leaks = LeakCheck(world)
        for dialect, stream in CASES:
            world.backends[0].script(behaviour)
            response = await ask(world, dialect, stream=stream)
            assert response.status == status, (dialect.name, response)
            expected = ANTHROPIC_TYPES[status] if dialect.name == "messages" else code
            assert dialect.error_code(response.body) == expected
            assert response.is_complete
        await leaks.check()
        assert len(world.backends[0].requests) == len(CASES)


@contextmanager
def black_hole(port: int) -> Iterator[None]:
    """A listener on `port` whose backlog is full: connects are neither accepted nor refused."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        try:
            yield
        finally:
            for filler in fillers:
                filler.close()


@pytest.mark.parametrize("fault", ["refuse", "black hole", "accept and reset"])
async def test_faults_of_the_connection(fault: str) -> None:
    """Refused, unanswered or reset connects are 502, in each dialect, within the connect timeout."""
    code = {"refuse": "upstream_refused", "black hole": "upstream_connect_failed"}.get(
        fault, "upstream_reset"
    )
    async with one_backend(connect_timeout_s=0.15 if fault == "black hole" else 2) as world:
        leaks = LeakCheck(world)
        backend = world.backends[0]
        port = backend.port
        if fault == "accept and reset":
            backend.is_dead = True
            backend.cut_all()
        else:
            await backend.stop()
        with black_hole(port) if fault == "black hole" else nullcontext():
            for dialect, stream in CASES:
                response = await ask(world, dialect, stream=stream)
                assert response.status == 502, (dialect.name, response)
                expected = "api_error" if dialect.name == "messages" else code
                assert dialect.error_code(response.body) == expected
        await leaks.check()


AFTER_THE_HEAD: dict[str, tuple[bytes, str]] = {
    "reset": (b"", "reset"),
    "close without the last chunk": (b"", "close"),
    "garbage instead of a chunk": (b"zz\r\n", "wait"),
    "a chunk longer than told": (b"3\r\nabcdef\r\n", "wait"),
    "half an event, then reset": (chunk(b"data: {"), "reset"),
    "half a chunk, then close": (b"20\r\nhalf", "close"),
    "silence": (b"", "wait"),
}


@pytest.mark.parametrize("fault", AFTER_THE_HEAD)
async def test_faults_inside_a_stream(fault: str) -> None:
    """What came is delivered, an error event of the dialect ends it, and nothing that looks complete."""
    rest, then = AFTER_THE_HEAD[fault]
    async with one_backend(**(IMPATIENT if fault in SILENCES else {})) as world:
        leaks = LeakCheck(world)
        for dialect in (dialect for dialect in DIALECTS if dialect.can_stream):
            gate = asyncio.Event()
            world.backends[0].script(_break_when_told(gate, rest, then))
            async with RawClient(world.gateway.port) as client:
                await client.send(post(dialect.path, dialect.encode(stream=True)))
                assert (await client.read_head())[0] == 200
                assert await client.read_chunk() == EVENT
                gate.set()
                ending = await client.read_to_end(timeout_s=5)
            assert not ending.endswith(b"0\r\n\r\n")
            assert b"[DONE]" not in ending
            assert b"finish_reason" not in ending
            assert ending.endswith(b"\n\n\r\n")
            assert dialect.error_event(ending.removesuffix(b"\r\n"))["error"]["message"]
        await leaks.check()


def _break_when_told(gate: asyncio.Event, rest: bytes, then: str) -> Behaviour:
    async def behave(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + chunk(EVENT))
        await gate.wait()
        await raw(rest, then)(turn)

    return behave


@pytest.mark.parametrize("then", ["reset", "close", "wait"])
async def test_faults_inside_a_whole_answer(then: str) -> None:
    """A sized answer that breaks off stays short of its length: no byte is invented."""
    async with one_backend(**(IMPATIENT if then in SILENCES else {})) as world:
        leaks = LeakCheck(world)
        for dialect in DIALECTS:
            world.backends[0].script(raw(SIZED_HEAD + b'{"id": "x', then))
            response = await ask(world, dialect, stream=False)
            assert response.status == 200
            assert not response.is_complete
            assert b'{"id": "x'.startswith(response.body)
        await leaks.check()


@pytest.mark.parametrize("then", ["reset", "close"])
@pytest.mark.parametrize("dialect", [DIALECTS[0], DIALECTS[2], DIALECTS[3]], ids=lambda dialect: dialect.name)
async def test_stream_cut_after_every_byte(dialect: Dialect, then: str) -> None:
    """A short stream cut after n bytes, for every n: an error status up to its first content, an error event
    after it, and the one complete answer only for all n bytes."""
    answer = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        + chunk(EVENT)
        + chunk(b"data: [DONE]\n\n")
        + b"0\r\n\r\n"
    )
    content_end = answer.index(EVENT) + len(EVENT)
    async with one_backend() as world:
        leaks = LeakCheck(world)
        for num_bytes in range(len(answer)):
            world.backends[0].script(raw(answer[:num_bytes], then))
            response = await ask(world, dialect, stream=True)
            assert not (response.status == 200 and response.is_complete), num_bytes
            if num_bytes < content_end:
                assert response.status == 502, num_bytes
            elif b"[DONE]" not in response.body:
                dialect.error_event(response.body)
        world.backends[0].script(raw(answer))
        response = await ask(world, dialect, stream=True)
        assert (response.status, response.is_complete) == (200, True)
        await leaks.check()


@pytest.mark.parametrize(("dialect", "stream"), CASES, ids=CASE_IDS)
async def test_engine_errors_pass_unchanged(dialect: Dialect, stream: bool) -> None:
    """B23: a 400 with its length, though a stream was asked for: all of it is the engine's."""
    body = b'{"object":"error","message":"max_tokens is too large","code":400}'
    async with one_backend() as world:
        world.backends[0].script(respond(body, status=400, reason="Bad Request"))
        response = await ask(world, dialect, stream=stream)
        assert (response.status, response.body, response.is_complete) == (400, body, True)
        assert response.header("content-length") == str(len(body))
        assert response.header("transfer-encoding") is None
        assert response.header("content-type") == "application/json"


async def test_engine_that_closes_idle_connections_costs_no_request() -> None:
    """B31: a backend that closes each connection right after its answer, or resets the second request on
    it, makes no client error in 120 requests, and is not held against it."""
    async with one_backend(max_idle_connections=256) as world:
        backend = world.backends[0]

        async def close_quietly(turn: Turn) -> None:
            await respond(b"{}")(turn)  # promises keep-alive, then closes
            turn.close()

        async def reset_second(turn: Turn) -> None:
            seen = [
                request for request in backend.requests if request.connection_id == turn.request.connection_id
            ]
            if len(seen) > 1:
                turn.reset()
            else:
                await respond(b"{}")(turn)

        for behaviour in (close_quietly, reset_second):
            backend.default = behaviour
            for number in range(60):
                response = await world.chat(f"s{number % 7}")
                assert response.status_code == 200, number
        assert world.state(0) == "ready"
