"""One upstream connection on a fake transport, with one request sent and ready to receive bytes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from fakes.transport import FakeTransport

from gateway.errors import (
    UpstreamError,
)
from gateway.scheduling.rounds import rounds_of_loop
from gateway.upstream.connection import UpstreamConnection
from gateway.upstream.exchange import BodySource, Exchange
from gateway.upstream.settings import UpstreamSettings

REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 11\r\n\r\nhello world"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"9\r\ndata: 1\n\n\r\n9;ext=1\r\ndata: 2\n\n\r\n0\r\ntrailer: x\r\n\r\n"
)
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: </x>\r\n\r\n" + SIZED
CLOSE_DELIMITED = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nuntil the end"


class Owner:
    """Counts what the connection reports to its pool."""

    def __init__(self) -> None:
        self.num_idle = 0
        self.num_lost = 0

    def on_idle(self, connection: UpstreamConnection) -> None:
        self.num_idle += 1

    def on_lost(self, connection: UpstreamConnection) -> None:
        self.num_lost += 1


@dataclass
class Sink:
    """Records the calls of one relay."""

    data: list[bytes] = field(default_factory=list)
    is_ended: bool = False
    source: BodySource | None = None

    def attach(self, source: BodySource) -> None:
        self.source = source

    def on_data(self, data: bytes, is_last: bool) -> None:
        assert not self.is_ended
        self.data.append(data)
        self.is_ended = is_last

    @property
    def body(self) -> bytes:
        return b"".join(self.data)


class Bench:
    """One connection with one request sent, ready to receive bytes."""

    def __init__(self, settings: UpstreamSettings | None = None, *, is_head_request: bool = False) -> None:
        self.owner = Owner()
        self.transport = FakeTransport()
        self.connection = UpstreamConnection(self.owner, settings or UpstreamSettings(), rounds_of_loop())
        self.connection.connection_made(self.transport)
        self.exchange: Exchange
        self.head: asyncio.Future[None]
        self.send(is_head_request=is_head_request)

    def send(self, *, is_head_request: bool = False) -> None:
        self.head = asyncio.get_running_loop().create_future()
        self.exchange = Exchange(self.head, self.connection._settings.max_early_body_bytes)
        self.connection.start(self.exchange, REQUEST, b"", is_head_request=is_head_request)

    def receive(self, *pieces: bytes) -> None:
        for piece in pieces:
            if not self.transport.is_closing():
                self.connection.data_received(piece)
                self.connection.read_arrived()

    def end(self, how: str) -> None:
        """The peer closes (`fin`) or resets (`rst`)."""
        if how == "fin":
            self.connection.eof_received()
        self.connection.connection_lost(ConnectionResetError() if how == "rst" else None)

    async def outcome(self) -> tuple[Sink, UpstreamError | None]:
        """What a relay started now delivers, and how it ends; it must end."""
        sink = Sink()
        try:
            await self.head
            await asyncio.wait_for(self.exchange.relay(sink), 1)
        except UpstreamError as error:
            return sink, error
        return sink, None

    @property
    def is_reusable(self) -> bool:
        return self.owner.num_idle == 1 and not self.transport.is_closing()
