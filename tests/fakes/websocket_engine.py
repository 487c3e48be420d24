"""A real WebSocket backend, as an engine with a realtime API has one."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web


class WebSocketEngine:
    """A WebSocket echo server; says `greeting` before it is asked, and closes with 4000 on `bye`."""

    def __init__(self) -> None:
        self.num_open = 0
        self.changed = asyncio.Event()
        self.port = 0
        self.handshakes: list[web.Request] = []
        self._transports: list[asyncio.Transport] = []
        self._runner: web.AppRunner

    async def start(self) -> None:
        application = web.Application()
        application.router.add_get("/v1/realtime", self._serve)
        application.router.add_get("/health", self._healthy)
        application.router.add_get("/v1/models", self._list_models)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    def cut_all(self) -> None:
        """Reset every open WebSocket, as a process that dies does."""
        for transport in self._transports:
            transport.abort()

    async def _healthy(self, request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": "fake-model"}]})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.handshakes.append(request)
        assert request.transport is not None
        self._transports.append(request.transport)
        if request.query.get("model") == "none":
            return web.json_response({"error": "no such model"}, status=404)
        socket = web.WebSocketResponse(protocols=("realtime",), max_msg_size=1 << 24)
        await socket.prepare(request)
        self.num_open += 1
        self.changed.set()
        await socket.send_str("greeting")
        async for message in socket:
            if message.data == "bye":
                await socket.close(code=4000, message=b"as you wish")
                break
            await (socket.send_bytes if message.type is aiohttp.WSMsgType.BINARY else socket.send_str)(
                message.data
            )
        self.num_open -= 1
        self.changed.set()
        return socket

    async def wait_open(self, count: int, timeout_s: float = 2.0) -> None:
        async with asyncio.timeout(timeout_s):
            while self.num_open != count:
                self.changed.clear()
                await self.changed.wait()
