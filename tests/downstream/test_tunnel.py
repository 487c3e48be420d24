"""WebSocket through both socket sides, with aiohttp's client and server as the two ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from fakes.raw_client import RawClient
from fakes.websocket_engine import WebSocketEngine

from gateway.downstream.relay import ClientRelay
from gateway.downstream.request import ClientRequest
from gateway.downstream.server import ClientServer
from gateway.downstream.settings import DownstreamSettings
from gateway.downstream.tunnel import tunnel
from gateway.upstream.pool import UpstreamPool
from gateway.upstream.settings import UpstreamSettings
from gateway.wire.headers import response_headers


class Gateway:
    """The shortest gateway that tunnels."""

    def __init__(self, engine: WebSocketEngine, settings: UpstreamSettings) -> None:
        self.pool = UpstreamPool(f"http://127.0.0.1:{engine.port}", settings)
        self.port = 0
        self.idle = asyncio.Event()
        self._server = ClientServer(self._handle, DownstreamSettings())
        self._listening: asyncio.Server

    async def start(self) -> None:
        self._listening = await asyncio.get_running_loop().create_server(self._server, "127.0.0.1", 0)
        self.port = self._listening.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._listening.close()
        await self._server.close(grace_s=0.1)
        await self.pool.close()

    def _handle(self, request: ClientRequest) -> None:
        self.idle.clear()
        request.on_gone = asyncio.ensure_future(self._serve(request)).cancel

    async def _serve(self, request: ClientRequest) -> None:
        try:
            fields = b"".join(b"%b: %b\r\n" % header for header in request.raw_headers)
            head = b"GET %b HTTP/1.1\r\n%b\r\n" % (request.raw_path.encode(), fields)
            exchange = await self.pool.open(head, b"", method="GET", may_upgrade=True)
            try:
                if exchange.status == 101:
                    await tunnel(request, exchange, response_headers(exchange.headers))
                    return
                relay = ClientRelay(request)
                relay.send_head(exchange.status, exchange.reason, [], content_length=exchange.content_length)
                await exchange.relay(relay)
            finally:
                exchange.abort()
        finally:
            self.idle.set()


@pytest.fixture
async def engine() -> AsyncIterator[WebSocketEngine]:
    made = WebSocketEngine()
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def gateway(engine: WebSocketEngine) -> AsyncIterator[Gateway]:
    made = Gateway(engine, UpstreamSettings())
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


async def test_messages_pass_both_ways(
    engine: WebSocketEngine, gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """Text and 2 MB of binary are echoed, a message that comes before any question arrives, and the
    subprotocol is the engine's choice."""
    url = f"ws://127.0.0.1:{gateway.port}/v1/realtime"
    async with session.ws_connect(url, protocols=("realtime",), max_msg_size=1 << 24) as socket:
        assert socket.protocol == "realtime"
        assert await socket.receive_str() == "greeting"
        await socket.send_str("hello")
        assert await socket.receive_str() == "hello"
        await socket.send_bytes(b"x" * 2_000_000)
        assert await socket.receive_bytes() == b"x" * 2_000_000
    await engine.wait_open(0)
    assert gateway.pool.stats().num_active == 0


async def test_engine_that_closes_ends_the_client(
    engine: WebSocketEngine, gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """The engine's close frame reaches the client, and both connections end."""
    async with session.ws_connect(f"ws://127.0.0.1:{gateway.port}/v1/realtime") as socket:
        await socket.receive_str()
        await socket.send_str("bye")
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
    await asyncio.wait_for(gateway.idle.wait(), 2)
    await engine.wait_open(0)


async def test_client_that_vanishes_frees_the_engine(engine: WebSocketEngine, gateway: Gateway) -> None:
    """FIN or RST of the client, without a close frame, ends the engine's side at once."""
    request = (
        b"GET /v1/realtime HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    for how in ("fin", "rst"):
        async with RawClient(gateway.port) as client:
            await client.send(request)
            assert (await client.read_head())[0] == 101
            await engine.wait_open(1)
            if how == "fin":
                client.half_close()
            else:
                client.reset()
            await engine.wait_open(0, timeout_s=0.5)
    assert gateway.pool.stats().num_active == 0


async def test_refused_upgrade_is_an_ordinary_answer(
    gateway: Gateway, session: aiohttp.ClientSession
) -> None:
    """An engine that answers 404 instead of 101 is relayed as such."""
    with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
        await session.ws_connect(f"ws://127.0.0.1:{gateway.port}/v1/realtime?model=none")
    assert refusal.value.status == 404


async def test_silent_tunnel_ends(engine: WebSocketEngine, session: aiohttp.ClientSession) -> None:
    """Silence in both directions for the idle timeout ends the tunnel; traffic keeps it open."""
    gateway = Gateway(engine, UpstreamSettings(idle_timeout_s=0.2))
    await gateway.start()
    async with session.ws_connect(f"ws://127.0.0.1:{gateway.port}/v1/realtime") as socket:
        await socket.receive_str()
        for _ in range(4):
            await asyncio.sleep(0.1)  # the tunnel's own time is under test
            await socket.send_str("still here")
            assert await socket.receive_str() == "still here"
        assert (await socket.receive(timeout=2)).type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
    await engine.wait_open(0)
    await gateway.stop()
