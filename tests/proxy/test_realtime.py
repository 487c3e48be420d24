"""`/v1/realtime` through the whole gateway: aiohttp's WebSocket client, real WebSocket backends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from fakes.gateway_world import GatewayWorld
from fakes.raw_client import RawClient
from fakes.websocket_engine import WebSocketEngine

HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: t\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class RealtimeWorld:
    """A gateway in front of WebSocket engines, and a client."""

    def __init__(self, world: GatewayWorld, engines: list[WebSocketEngine]) -> None:
        self.world, self.engines = world, engines
        self.session = aiohttp.ClientSession()

    def connect(self, query: str = "", **options: Any) -> Any:
        return self.session.ws_connect(f"{self.world.base_url}/v1/realtime{query}", **options)

    @property
    def num_in_flight(self) -> int:
        view = self.world.gateway.fleet.view
        return sum(self.world.gateway.router.in_flight(backend_id) for backend_id in view.backends)

    async def wait_idle(self) -> None:
        """Until every gauge is at zero and no backend has a connection open."""
        await self.world.wait_for(lambda: self.world.gateway.proxy.num_in_flight == 0)
        self.world.assert_idle()
        for engine in self.engines:
            await engine.wait_open(0)

    def served_by(self) -> list[int]:
        return [number for number, engine in enumerate(self.engines) for _ in engine.handshakes]


@asynccontextmanager
async def realtime_world(num_engines: int = 1, **config: Any) -> AsyncIterator[RealtimeWorld]:
    engines = [WebSocketEngine() for _ in range(num_engines)]
    for engine in engines:
        await engine.start()
    backends = [
        {"id": f"b{number}", "url": f"http://127.0.0.1:{engine.port}", "engine": "vllm"}
        for number, engine in enumerate(engines)
    ]
    try:
        async with GatewayWorld(0, backends=backends, **config) as world:
            realtime = RealtimeWorld(world, engines)
            async with realtime.session:
                yield realtime
    finally:
        for engine in engines:
            await engine.stop()


async def test_a_conversation_passes_and_is_counted_to_its_end() -> None:
    """Subprotocol, text, 1 MB of binary, pings and the engine's close code pass; the backend's in-flight
    count is one until the end."""
    async with realtime_world() as realtime:
        async with realtime.connect(protocols=("realtime",), max_msg_size=1 << 24) as socket:
            assert socket.protocol == "realtime"
            assert await socket.receive_str() == "greeting"
            await socket.send_str("hello")
            assert await socket.receive_str() == "hello"
            await socket.send_bytes(b"x" * 1_000_000)
            assert await socket.receive_bytes() == b"x" * 1_000_000
            await socket.ping(b"are you there")
            assert realtime.num_in_flight == 1
            await socket.send_str("bye")
            farewell = await socket.receive()
            assert (farewell.type, farewell.data, farewell.extra) == (
                aiohttp.WSMsgType.CLOSE,
                4000,
                "as you wish",
            )
        await realtime.wait_idle()


async def test_the_handshake_reaches_the_engine_whole() -> None:
    """Upgrade and Sec-WebSocket fields arrive once each, our own too; the client learns its backend."""
    async with realtime_world() as realtime:
        async with realtime.connect("?model=fake-model", headers={"x-homing-forged": "1"}) as socket:
            await socket.receive_str()
            handshake = realtime.engines[0].handshakes[0]
            assert handshake.path_qs == "/v1/realtime?model=fake-model"
            assert handshake.headers.getall("connection") == ["upgrade"]
            assert handshake.headers.getall("upgrade") == ["websocket"]
            assert len(handshake.headers.getall("sec-websocket-key")) == 1
            assert handshake.headers["x-request-id"].startswith("req-")
            assert "x-homing-forged" not in handshake.headers
            answered = socket._response.headers  # aiohttp shows the head of a handshake nowhere else
            assert answered["x-homing-backend"] == "b0"
            assert answered.getall("connection") == ["upgrade"]
        await realtime.wait_idle()


@pytest.mark.parametrize(
    ("query", "headers"), [("", {"x-session-id": "s-1"}), ("?model=fake-model&session_id=s-1", {})]
)
async def test_a_session_comes_back_to_its_engine(query: str, headers: dict[str, str]) -> None:
    """The session is known by header, or by query where a browser can set no header."""
    async with realtime_world(3) as realtime:
        for _ in range(5):
            async with realtime.connect(query, headers=headers) as socket:
                await socket.receive_str()
        assert len(set(realtime.served_by())) == 1
        await realtime.wait_idle()


async def test_an_unknown_model_is_404_before_any_upgrade() -> None:
    """The model in the query decides where to go, as the one in a body does."""
    async with realtime_world() as realtime:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            await realtime.connect("?model=other")
        assert refusal.value.status == 404
        assert realtime.served_by() == []


async def test_an_engine_that_refuses_is_relayed() -> None:
    """Any other status than 101 is an ordinary answer; without a handshake the request is an ordinary one."""
    async with realtime_world() as realtime:
        plain = await realtime.world.client.get("/v1/realtime", headers={"x-session-id": "a"})
        assert plain.status_code == 400  # aiohttp's own word for "no WebSocket handshake"
        assert realtime.engines[0].handshakes[0].headers.get("upgrade") is None
        await realtime.wait_idle()


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_a_client_that_vanishes_frees_everything(how: str) -> None:
    """FIN or RST without a close frame ends the engine's side, and every gauge is zero."""
    async with realtime_world() as realtime, RawClient(realtime.world.gateway.port) as client:
        await client.send(HANDSHAKE)
        assert (await client.read_head())[0] == 101
        await realtime.engines[0].wait_open(1)
        client.half_close() if how == "fin" else client.reset()
        await realtime.wait_idle()


async def test_an_engine_that_dies_ends_the_client() -> None:
    """A reset of the backend closes the client's connection; nothing invented is sent to it."""
    async with realtime_world() as realtime:
        async with realtime.connect() as socket:
            await socket.receive_str()
            realtime.engines[0].cut_all()
            ending = await socket.receive(timeout=5)
            assert ending.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
            assert socket.close_code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE
        await realtime.wait_idle()


async def test_the_drain_deadline_ends_it() -> None:
    """A WebSocket lasts through the drain and is cut at its deadline, with no answer written into it."""
    async with realtime_world() as realtime:
        async with RawClient(realtime.world.gateway.port) as client:
            await client.send(HANDSHAKE)
            await client.read_head()
            await client.reader.readexactly(2 + len("greeting"))
            await realtime.world.gateway.stop(drain_timeout_s=0.3)
            assert await client.read_to_end() == b""
        await realtime.wait_idle()


async def test_another_backend_is_tried_before_the_upgrade() -> None:
    """A dead backend costs no client its handshake."""
    async with realtime_world(2) as realtime:
        await realtime.engines[0].stop()
        for _ in range(4):
            async with realtime.connect() as socket:
                assert await socket.receive_str() == "greeting"
        assert set(realtime.served_by()) == {1}
        await realtime.wait_idle()


async def test_a_page_of_another_origin_opens_nothing() -> None:
    """With `cors` the origins that may call may also connect, programs (no origin) always; others get 403."""
    allowed = {"allow_origins": ["https://chat.example.org"]}
    async with realtime_world(downstream={"cors": allowed}) as realtime:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            await realtime.connect(headers={"origin": "https://evil.example"})
        assert refusal.value.status == 403
        for headers in ({"origin": "https://chat.example.org"}, {}):
            async with realtime.connect(headers=headers) as socket:
                assert await socket.receive_str() == "greeting"
        assert len(realtime.served_by()) == 2
        await realtime.wait_idle()


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/responses", 426), ("/v1/chat/completions", 426), ("/v1/models", 426), ("/made/up", 404)],
)
async def test_a_websocket_where_none_is_taken(path: str, status: int) -> None:
    """426, at which clients such as Codex go on with plain requests; without the handshake as ever."""
    handshake = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with GatewayWorld(1) as world:
        answer = await world.client.get(path, headers=handshake)
        assert answer.status_code == status
        if status == 426:
            assert answer.headers["upgrade"] == "HTTP/1.1"
            assert answer.json()["error"]["code"] == "upgrade_required"
        assert (await world.client.get("/v1/responses")).status_code == 405
