"""Clients that drip, flood, idle, or send a body that nobody wants: each holds little, and not for long."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
from fakes.raw_client import RawClient, post

from gateway.downstream.connection import MAX_WAITING_BYTES, ClientConnection
from gateway.downstream.request import ClientRequest
from gateway.downstream.server import ClientServer
from gateway.downstream.settings import DownstreamSettings

READ_SIZE_BYTES = 262_144  # what one read of a socket may bring
EXPECTING = b"POST / HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"


class Served:
    """A server whose handler keeps its requests, or answers them at once."""

    def __init__(self, server: ClientServer, port: int, requests: list[ClientRequest]) -> None:
        self.server, self.port, self.requests = server, port, requests

    @property
    def connection(self) -> ClientConnection:
        (connection,) = self.server.connections
        assert isinstance(connection, ClientConnection)
        return connection

    async def wait_for(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not is_so():
                await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(*, answers: bool = True, **options: float) -> AsyncIterator[Served]:
    requests: list[ClientRequest] = []

    def handle(request: ClientRequest) -> None:
        if answers:
            request.answer(200, (("content-type", "text/plain"),), b"ok")
        else:
            requests.append(request)

    server = ClientServer(handle, DownstreamSettings(**options))  # type: ignore[arg-type]
    listening = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    yield Served(server, listening.sockets[0].getsockname()[1], requests)
    listening.close()
    await server.close()


async def test_a_dripping_head_gets_no_more_time() -> None:
    """Bytes that keep coming do not prolong the time for a head: 408."""
    async with serving(keep_alive_timeout_s=0.3) as served, RawClient(served.port) as client:
        answer = asyncio.create_task(client.read_response(timeout_s=3))
        client.writer.write(b"GET / HTTP/1.1\r\nHost: t\r\nX: ")
        while not answer.done():
            client.writer.write(b"x")
            await asyncio.wait((answer,), timeout=0.02)
        assert answer.result().status == 408
        assert await client.read_to_end() == b""


async def test_a_head_has_its_own_time_after_an_idle_one() -> None:
    """A client that was idle for most of the limit may still take a moment to send its head."""
    async with serving(keep_alive_timeout_s=0.4) as served, RawClient(served.port) as client:
        await asyncio.sleep(0.25)
        await client.send(b"GET / HTTP/1.1\r\n")
        await asyncio.sleep(0.25)
        await client.send(b"Host: t\r\n\r\n")
        assert (await client.read_response()).status == 200


async def test_what_is_pipelined_is_read_ahead_only_so_far() -> None:
    """Behind a request that waits, a flood stays in the client; all of it is served afterwards, in order."""
    async with serving(answers=False) as served, RawClient(served.port) as client:
        num_requests = 60_000
        client.writer.write(b"".join(post(f"/{number}", b"") for number in range(num_requests)))
        await served.wait_for(lambda: bool(served.requests))
        await asyncio.sleep(0.1)
        waiting = served.connection._waiting
        assert len(served.requests) == 1
        assert len(waiting) <= MAX_WAITING_BYTES + 2 * READ_SIZE_BYTES
        for number in range(500):
            await served.wait_for(lambda number=number: len(served.requests) > number)  # type: ignore[misc]
            assert served.requests[number].raw_path == f"/{number}"
            served.requests[number].answer(200, ())
            assert (await client.read_response()).status == 200
        client.reset()


async def test_a_body_that_nobody_waits_for_is_read_ahead_only_so_far() -> None:
    """Before the handler asks for it, a body of megabytes stays in the client; asked for, it comes whole."""
    async with serving(answers=False) as served, RawClient(served.port) as client:
        client.writer.write(post("/", b"x" * 20_000_000))
        await served.wait_for(lambda: bool(served.requests))
        await asyncio.sleep(0.1)
        (request,) = served.requests
        assert request.incoming is not None
        assert request.incoming.num_bytes <= MAX_WAITING_BYTES + READ_SIZE_BYTES
        assert len(await request.read_body()) == 20_000_000
        request.answer(200, ())
        assert (await client.read_response()).status == 200


async def test_the_rest_of_an_unwanted_body_is_skipped() -> None:
    """An answer that did not need the body leaves the connection open, once the rest has come."""
    async with serving() as served, RawClient(served.port) as client:
        request = post("/", b"x" * 300_000)
        await client.send(request[:1_000])
        answer = await client.read_response()
        assert (answer.status, answer.header("connection")) == (200, None)
        await client.send(request[1_000:] + post("/", b"{}"))
        assert (await client.read_response()).status == 200


async def test_an_unwanted_body_that_does_not_come_ends_the_connection() -> None:
    """After `linger_s`."""
    async with serving(linger_s=0.2) as served, RawClient(served.port) as client:
        await client.send(post("/", b"x" * 300_000)[:1_000])
        assert (await client.read_response()).status == 200
        assert await client.read_to_end(timeout_s=3) == b""


async def test_a_body_that_was_not_invited_ends_the_connection() -> None:
    """A client that waits for `100 Continue` may send its body or not: nothing behind it can be read."""
    async with serving(linger_s=0.2) as served, RawClient(served.port) as client:
        await client.send(EXPECTING)
        answer = await client.read_response()
        assert (answer.status, answer.num_interim, answer.header("connection")) == (200, 0, "close")
        assert await client.read_to_end(timeout_s=3) == b""


async def test_a_client_that_never_reads_its_small_answer_may_be_closed() -> None:
    """Closing waits for what was written; nothing keeps the server from ending."""
    async with serving(answers=False) as served, RawClient(served.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(post("/", b"{}", "Connection: close"))
        await served.wait_for(lambda: bool(served.requests))
        served.requests[0].answer(200, (), b"x" * 30_000_000)
        await asyncio.sleep(0.05)
        assert len(served.server.connections) == 1
        await served.server.close()
        assert not served.server.connections


async def test_gone_is_told_once_and_never_after_the_end() -> None:
    """`on_gone` belongs to the time between head and answer."""
    gone: list[str] = []
    async with serving(answers=False) as served:
        for name in ("left", "answered"):
            async with RawClient(served.port) as client:
                await client.send(post("/", b"{}"))
                await served.wait_for(lambda: bool(served.requests))
                request = served.requests.pop()
                request.on_gone = lambda name=name: gone.append(name)
                if name == "answered":
                    request.answer(200, ())
                    assert (await client.read_response()).status == 200
                client.reset()
                await served.wait_for(lambda: not served.server.connections)
            assert request.transport is None
            request.answer(200, ())  # to nobody
    assert gone == ["left"]


@pytest.mark.parametrize("num_clients", [2_000])
async def test_an_idle_connection_is_small(num_clients: int) -> None:
    """At most 10 KB of Python's memory each, on both sides of this process, after it has served a request."""
    async with serving() as served:
        await _ask_and_stay(served, 50)  # warm up
        gc.collect()
        tracemalloc.start()
        try:
            clients = await _ask_and_stay(served, num_clients)
            gc.collect()
            mine = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.Filter(True, "*/gateway/downstream/*"), tracemalloc.Filter(True, "*/asyncio/*")]
            )
            num_bytes = sum(one.size for one in mine.statistics("filename"))
        finally:
            tracemalloc.stop()
        assert num_bytes / num_clients <= 10_000
        for client in clients:
            client.close()
        await served.wait_for(lambda: len(served.server.connections) <= 50)


async def test_an_unfinished_head_costs_its_bytes() -> None:
    """S05: before a credential was shown, a head of the largest size holds little more than itself."""
    beginning = b"POST / HTTP/1.1\r\nHost: t\r\n" + b"".join(
        b"x-%d: %b\r\n" % (number, b"v" * 240) for number in range(250)
    )
    async with serving() as served:
        loop = asyncio.get_running_loop()
        tracemalloc.start()
        try:
            clients = []
            for _ in range(50):
                client, _protocol = await loop.create_connection(asyncio.Protocol, "127.0.0.1", served.port)
                clients.append(client)
                client.write(beginning[:30_000])
                client.write(beginning[30_000:])
            await served.wait_for(lambda: _num_unfinished_bytes(served) == 50 * len(beginning))
            gc.collect()
            mine = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.Filter(True, "*/gateway/*"), tracemalloc.Filter(True, "*/asyncio/*")]
            )
            num_bytes = sum(one.size for one in mine.statistics("filename"))
        finally:
            tracemalloc.stop()
        assert num_bytes / 50 <= len(beginning) + 10_000
        for client in clients:
            client.close()


def _num_unfinished_bytes(served: Served) -> int:
    return sum(len(one._waiting) for one in served.server.connections if isinstance(one, ClientConnection))


async def _ask_and_stay(served: Served, num_clients: int) -> list[asyncio.Transport]:
    """Connections that have asked once and stay open."""
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(num_clients):
        waiter: asyncio.Future[None] = loop.create_future()
        client, _protocol = await loop.create_connection(partial(_Asking, waiter), "127.0.0.1", served.port)
        clients.append(client)
        await waiter
    return clients


class _Asking(asyncio.Protocol):
    def __init__(self, answered: asyncio.Future[None]) -> None:
        self._answered = answered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(post("/", b"{}", *(f"x-{number}: {'v' * 50}" for number in range(10))))  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._answered.set_result(None)
