"""WebSocket through the gateway: two transports joined, nothing parsed.

Decision: after the backend's `101` the gateway is a pipe. Frames are not looked at, so no extension or
subprotocol needs to be known here, and when the gateway ends a tunnel it sends no close frame: that could
land inside a frame of the backend's. Either side's end ends the other; each side's slowness holds the other
back; silence in both directions for the upstream's `idle_timeout_s` ends both.

Both transports get a new protocol. The client's still tells its connection when it is lost, or slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gateway.downstream.request import ClientRequest, Connection
from gateway.upstream.answer import Carrier, UpstreamAnswer

_HEAD = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n"


def wants_websocket(request: ClientRequest) -> bool:
    """Whether this is the opening handshake of a WebSocket (RFC 6455, 4.1; HTTP/1.0 cannot upgrade)."""
    connection = ",".join(request.headers.getall("connection", ())).lower()
    return (
        request.method == "GET"
        and request.is_http11
        and request.headers.get("upgrade", "").strip().lower() == "websocket"
        and "upgrade" in (token.strip() for token in connection.split(","))
    )


async def tunnel(
    request: ClientRequest, exchange: UpstreamAnswer, headers: Iterable[tuple[bytes, bytes]]
) -> None:
    """Answer 101 with the backend's end-to-end `headers` and pass bytes both ways until one side ends.

    Raises ConnectionResetError when the client has gone, UpstreamReset when the backend has. Cancelling
    closes both sides.
    """
    client = request.transport
    if client is None:
        raise ConnectionResetError("the client has gone")
    carrier, backend = exchange.take_over()
    connection = request.connection
    pipe = _Pipe(client, backend, carrier)
    head = b"".join([_HEAD, *(b"%b: %b\r\n" % header for header in headers)])
    client.write(head + b"\r\n" + exchange.early)
    connection.relay = pipe
    backend.set_protocol(pipe)
    early = connection.hand_over(_FromClient(connection, pipe))
    if early:
        pipe.to_backend(early)
    if not connection.is_writing_paused:
        backend.resume_reading()
    try:
        await pipe.ended
    finally:
        backend.close()
        connection.on_answered(keeps_alive=False)


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


class _FromClient(asyncio.Protocol):
    """The client's new protocol. FIN is a client that left: asyncio closes the transport then."""

    def __init__(self, connection: Connection, pipe: _Pipe) -> None:
        self._connection, self._pipe = connection, pipe

    def data_received(self, data: bytes) -> None:
        self._pipe.to_backend(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)
        self._pipe.end()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
