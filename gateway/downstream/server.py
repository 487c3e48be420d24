"""aiohttp's low-level server, set up for a gateway.

Decision: `web.Server` (no router, no middlewares, one handler for all), with `handler_cancellation`, so that
a client that leaves cancels its handler wherever it waits; bodies are not decompressed (they are forwarded
as received) and no access log is written here. Nothing of aiohttp beyond its public members is used.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from gateway.downstream.connection import ClientConnection, OpenConnections
from gateway.downstream.refusal import Refusal
from gateway.downstream.relay import close_response
from gateway.downstream.settings import DownstreamSettings

# Listeners, logs, the store, probes of a middling fleet.
RESERVED_DESCRIPTORS = 64

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class ClientServer(web.Server):
    """Makes a `ClientConnection` for each accepted socket."""

    def __init__(
        self,
        handler: Handler,
        open_connections: OpenConnections,
        make_connection: Callable[[web.Server], ClientConnection],
    ) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._open_connections = open_connections
        self._make_connection = make_connection

    def leave(self) -> None:
        """From now on each answer says that it is the last one on its connection, and is."""
        self._open_connections.is_leaving = True

    def __call__(self) -> web.RequestHandler:
        return self._make_connection(self)


def make_server(
    handler: Handler,
    settings: DownstreamSettings,
    *,
    on_refusal: Callable[[Refusal], None] | None = None,
) -> ClientServer:
    """A server to give to `web.ServerRunner`.

    `on_refusal` is told of each request that got no answer of the handler's: unparsable, or a failure.
    """

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, ClientConnection)
        connection.begin(request)
        try:
            return _judged(await handler(request), connection)
        finally:
            connection.end()

    options = _aiohttp_options(settings)
    open_connections = OpenConnections(settings.max_connections or _room_for_connections())

    def make_connection(server: web.Server) -> ClientConnection:
        return ClientConnection(
            server,
            settings=settings,
            open_connections=open_connections,
            on_refusal=on_refusal,
            loop=asyncio.get_running_loop(),
            **options,
        )

    return ClientServer(handle, open_connections, make_connection)


def _judged(response: web.StreamResponse, connection: ClientConnection) -> web.StreamResponse:
    """The answer of the handler; but no second one where one had begun, for the next request would get it."""
    if isinstance(response, web.Response):
        relay = connection.relay
        if relay is not None and relay.has_started:
            relay.fail()
            return close_response()
        if connection.is_leaving:
            response.force_close()
    return response


def _aiohttp_options(settings: DownstreamSettings) -> dict[str, Any]:
    """Our settings in aiohttp's words."""
    return {
        "keepalive_timeout": settings.keep_alive_timeout_s,
        "max_line_size": settings.max_request_line_bytes,
        "max_field_size": settings.max_header_field_bytes,
        "max_headers": settings.max_headers,
        "tcp_keepalive": False,  # set together with its intervals, see `connection`
        "auto_decompress": False,
        "lingering_time": settings.linger_s,
        "access_log": None,
    }


def _room_for_connections() -> int:
    """Half of the descriptors that this process may still open: a request needs one on each side."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return 1 << 20
    return max(16, (soft_limit - RESERVED_DESCRIPTORS) // 2)
