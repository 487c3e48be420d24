"""WebSocket through the gateway: two transports joined, nothing parsed.

Decision: after the backend's `101` the gateway is a pipe. Frames are not looked at, so no extension or
subprotocol needs to be known here, and when the gateway ends a tunnel it sends no close frame: that could
land inside a frame of the backend's. Either side's end ends the other; each side's slowness holds the other
back; silence in both directions for the upstream's `idle_timeout_s` ends both.

The client's bytes come through aiohttp's public `set_parser`, the hook that
its own WebSocket implementation uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import cast

from aiohttp import HttpVersion11, web
from aiohttp.http import WebSocketReader

from gateway.downstream.connection import ClientConnection
from gateway.downstream.relay import close_response
from gateway.upstream.answer import Carrier
from gateway.upstream.exchange import Exchange

_HEAD = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n"


def wants_websocket(request: web.BaseRequest) -> bool:
    """Whether this is the opening handshake of a WebSocket (RFC 6455, 4.1; HTTP/1.0 cannot upgrade)."""
    connection = ",".join(request.headers.getall("connection", ())).lower()
    return (
        request.method == "GET"
        and request.version >= HttpVersion11
        and request.headers.get("upgrade", "").strip().lower() == "websocket"
        and "upgrade" in (token.strip() for token in connection.split(","))
    )


async def tunnel(
    request: web.BaseRequest, exchange: Exchange, headers: Iterable[tuple[bytes, bytes]]
) -> web.StreamResponse:
    """Answer 101 with the backend's end-to-end `headers` and pass bytes both ways until one side ends.

    Raises ConnectionResetError when the client has gone, UpstreamReset when the backend has. Cancelling
    closes both sides.
    """
    client = request.transport
    if client is None:
        raise ConnectionResetError("the client has gone")
    carrier, backend = exchange.take_over()
    pipe = _Pipe(client, backend, carrier)
    head = b"".join([_HEAD, *(b"%b: %b\r\n" % header for header in headers)])
    client.write(head + b"\r\n" + exchange.early)
    connection = request.protocol
    assert isinstance(connection, ClientConnection)
    connection.relay = pipe
    backend.set_protocol(pipe)
    connection.set_parser(cast(WebSocketReader, _FromClient(pipe)))
    backend.resume_reading()
    try:
        await pipe.ended
    finally:
        backend.close()
    return close_response()


class _Pipe(asyncio.Protocol):
    """The backend's new protocol, and the relay of the client's connection."""

    def __init__(self, client: asyncio.Transport, backend: asyncio.Transport, carrier: Carrier) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = client
        self._backend = backend
        self._carrier = carrier

    # -- from the backend

    def data_received(self, data: bytes) -> None:
        self._carrier.touch()
        if not self._client.is_closing():
            self._client.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._carrier.connection_lost(exc)
        self.end()

    def pause_writing(self) -> None:
        if not self._client.is_closing():
            self._client.pause_reading()

    def resume_writing(self) -> None:
        if not self._client.is_closing():
            self._client.resume_reading()

    # -- from the client

    def to_backend(self, data: bytes) -> None:
        self._carrier.touch()
        if not self._backend.is_closing():
            self._backend.write(data)

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    # -- the client connection's Relay

    fail = end

    @property
    def has_started(self) -> bool:
        return True

    @property
    def survives_fin(self) -> bool:
        return False  # a WebSocket ends with a frame; FIN without one is a client that left

    def send_comment(self) -> bool:
        return False

    def hold_back(self) -> None:
        if not self._backend.is_closing():
            self._backend.pause_reading()

    def let_go(self) -> None:
        if not self._backend.is_closing():
            self._backend.resume_reading()


class _FromClient:
    """What aiohttp feeds with the client's bytes after an upgrade."""

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self._pipe.to_backend(data)
        return False, b""

    def feed_eof(self) -> None:
        self._pipe.end()
