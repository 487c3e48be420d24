"""The two socket sides joined by the shortest possible proxy: one backend, no routing, no sessions.

Lets the tests of `upstream` and `downstream` speak raw bytes on both ends without the rest of the gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Self

from gateway.downstream.open_connections import OpenConnection
from gateway.downstream.refusal import Refusal
from gateway.downstream.relay import ClientRelay
from gateway.downstream.request import ClientRequest
from gateway.downstream.server import ClientServer
from gateway.downstream.settings import DownstreamSettings
from gateway.errors import GatewayError
from gateway.upstream.pool import UpstreamPool
from gateway.upstream.settings import UpstreamSettings

_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"connection", b"keep-alive"))


class RelayServer:
    """`async with RelayServer(base_url) as server:` then `server.port`."""

    def __init__(
        self,
        base_url: str,
        *,
        upstream: UpstreamSettings | None = None,
        downstream: DownstreamSettings | None = None,
    ) -> None:
        self._base_url = base_url
        self._upstream_settings = upstream or UpstreamSettings()
        self._downstream_settings = downstream or DownstreamSettings()
        self.refusals: list[Refusal] = []
        self.bodies: list[bytes] = []
        self.num_in_flight = 0
        self.num_cancelled = 0
        self.failure: Exception | None = None  # raised in each handler
        self.idle = asyncio.Event()
        self.pool: UpstreamPool
        self.port = 0
        self._server: ClientServer
        self._listening: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def start(self) -> None:
        self.pool = UpstreamPool(self._base_url, self._upstream_settings)
        self._server = ClientServer(self._handle, self._downstream_settings, on_refusal=self.refusals.append)
        self._listening = await asyncio.get_running_loop().create_server(self._server, "127.0.0.1", 0)
        self.port = self._listening.sockets[0].getsockname()[1]

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        self._listening.close()
        await self._server.close(grace_s=0.1)
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.pool.close()

    @property
    def connections(self) -> Collection[OpenConnection]:
        return self._server.connections

    async def wait_idle(self, timeout_s: float = 5.0) -> None:
        """Until no request is in flight."""
        async with asyncio.timeout(timeout_s):
            await self.idle.wait()

    def _handle(self, request: ClientRequest) -> None:
        if self.failure is not None:
            raise self.failure
        self.num_in_flight += 1
        self.idle.clear()
        task = asyncio.ensure_future(self._serve(request))
        request.on_gone = task.cancel
        self._tasks.add(task)
        task.add_done_callback(self._on_served)

    def _on_served(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self.num_cancelled += 1
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self.idle.set()

    async def _serve(self, request: ClientRequest) -> None:
        try:
            await self._answer(request)
        except GatewayError as exc:
            request.answer(exc.status, (("content-type", "text/plain"),), exc.code.encode())

    async def _answer(self, request: ClientRequest) -> None:
        body = await request.read_body()
        self.bodies.append(body)
        request_line = f"{request.method} {request.raw_path} HTTP/1.1\r\n"
        head = f"{request_line}host: fake\r\ncontent-length: {len(body)}\r\n\r\n"
        exchange = await self.pool.open(head.encode(), body, method=request.method)
        relay = ClientRelay(request)
        try:
            headers = [header for header in exchange.headers if header[0] not in _FRAMING]
            is_event_stream = (b"content-type", b"text/event-stream") in headers
            relay.send_head(
                exchange.status,
                exchange.reason,
                headers,
                content_length=exchange.content_length,
                is_event_stream=is_event_stream,
            )
            await exchange.relay(relay)
        except GatewayError as exc:
            relay.fail(b'data: {"error": "%b"}\n\n' % exc.code.encode())
        finally:
            exchange.abort()
