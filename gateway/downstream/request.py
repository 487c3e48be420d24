"""One request of a client, from its head on: what it says, its body when that has come, and its answer.

The connection makes it when the head has been read, and gives it to the handler at once. When the body came
in the same read, which is the usual case, `is_complete` is true and nothing needs to be awaited; else
`read_body` waits for the rest, within a size and a time. The answer is one call of `answer`, or a
`ClientRelay`.

Decisions: the size limit holds for the bytes as received and is checked before the first byte is read where
the length is declared; `100 Continue` is sent only for a body we are willing to read; a body must not stall,
nor trickle.
"""

from __future__ import annotations

import asyncio
import email.utils
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final, Protocol

from gateway.downstream.body import ChunkedBody, SizedBody
from gateway.downstream.head import HeadLimits, RequestHead
from gateway.downstream.settings import DownstreamSettings
from gateway.errors import BadRequest, BodyTooLarge, ExpectationFailed, GatewayError, RequestTimeout
from gateway.scheduling.rounds import Rounds

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}


class Relay(Protocol):
    """The answer under way on a connection, as far as the connection needs it."""

    @property
    def has_started(self) -> bool: ...

    def hold_back(self) -> None: ...

    def let_go(self) -> None: ...

    def send_comment(self) -> bool: ...

    def fail(self) -> None:
        """End it so that it never looks complete; does nothing after its end."""

    @property
    def survives_fin(self) -> bool:
        """A client that only finished sending may still want the rest."""


class Connection(Protocol):
    """The connection, as its requests, relays and tunnels see it."""

    transport: asyncio.Transport | None
    request: ClientRequest | None
    relay: Relay | None
    settings: DownstreamSettings
    is_writing_paused: bool
    rounds: Rounds

    @property
    def is_leaving(self) -> bool:
        """Each answer must end its connection."""

    def want_body(self) -> None:
        """The rest of the body is waited for: let it come, and time it."""

    def abort(self) -> None:
        """Cut the connection off, so that the client sees a reset."""

    def on_answered(self, *, keeps_alive: bool) -> None:
        """The last byte of the answer has been written."""

    def hand_over(self, protocol: asyncio.Protocol) -> bytes:
        """Give the transport to another protocol; return what it has not seen yet of the client's bytes.

        The new protocol must pass `connection_lost`, `pause_writing` and `resume_writing` on to here.
        """

    def connection_lost(self, exc: Exception | None) -> None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


class ClientRequest(RequestHead):
    """Made by the connection; served by the handler, which must answer it, now or later."""

    __slots__ = (
        "_failure",
        "_is_wanted",
        "_on_body",
        "body",
        "connection",
        "incoming",
        "is_complete",
        "on_gone",
    )

    def __init__(self, connection: Connection, raw: bytes, limits: HeadLimits) -> None:
        """`raw` is the whole head. Raises Refused."""
        RequestHead.__init__(self, raw, limits)
        self.connection = connection
        self.body = b""  # as received, without transfer coding, once it is complete
        self.is_complete = False
        self.incoming: SizedBody | ChunkedBody | None = None  # until it is complete
        self.on_gone: Callable[[], object] | None = None
        """Called once when the client has left before the end of the answer."""
        self._is_wanted = False
        self._on_body: Callable[[], None] | None = None
        self._failure: GatewayError | ConnectionResetError | None = None

    # -- for the handler

    @property
    def transport(self) -> asyncio.Transport | None:
        """None once the client has gone, or has been answered."""
        connection = self.connection
        return connection.transport if connection.request is self else None

    @property
    def may_keep_alive(self) -> bool:
        """Whether the connection may serve another request after this one."""
        return (
            self.keeps_alive and not self.connection.is_leaving and (self.is_complete or self._may_skip_body)
        )

    def receive(self, on_body: Callable[[], None]) -> None:
        """Have the rest of the body come. `on_body` is called once, when `take_body` has something to say.

        Not called when the client leaves and `on_gone` is set. Raises GatewayError for a body that is refused
        before it comes.
        """
        if self.content_length is not None and self.content_length > self.connection.settings.max_body_bytes:
            self.fail_body(self._too_large())
        if self._failure is not None:
            raise self._failure
        self._answer_expectation()
        self._on_body = on_body
        self._is_wanted = True
        self.connection.want_body()

    @property
    def has_failed(self) -> bool:
        """The body will never be complete; `take_body` says why."""
        return self._failure is not None

    def take_body(self) -> bytes:
        """Return the whole body as received (transfer coding removed, content coding kept).

        Raises BodyTooLarge, RequestTimeout, BadRequest or ExpectationFailed; the answer closes the connection
        where the rest of the body cannot be thrown away. Raises ConnectionResetError for a gone client.
        """
        if self._failure is not None:
            raise self._failure
        assert self.is_complete
        if len(self.body) > self.connection.settings.max_body_bytes:
            raise self._too_large()
        return self.body

    async def read_body(self) -> bytes:
        """Wait for `take_body`, and raise what it raises."""
        if not self.is_complete:
            arrived = asyncio.Event()
            self.receive(arrived.set)
            await arrived.wait()
        return self.take_body()

    def answer(self, status: int, headers: Iterable[tuple[str, str]], body: bytes = b"") -> None:
        """Send a whole answer of ours, and end the request. Length, date and connection are added here.

        Does nothing when the client has gone. Where another answer has begun, that one is broken off: no
        second one can follow it. Raises ValueError for a header that would break the head.
        """
        connection, transport = self.connection, self.transport
        if transport is None:
            return
        if connection.relay is not None and connection.relay.has_started:
            connection.relay.fail()
            return
        keeps_alive = self.may_keep_alive
        head = self._answer_head(status, headers, len(body), keeps_alive)
        is_bodyless = self.method == "HEAD" or status in (204, 304)
        transport.write(head if is_bodyless else head + body)
        connection.on_answered(keeps_alive=keeps_alive)

    # -- for the connection

    @property
    def is_wanted(self) -> bool:
        """Somebody waits for the body."""
        return self._is_wanted

    def complete_body(self) -> None:
        """The last byte has come."""
        assert self.incoming is not None
        self.body = self.incoming.join()
        self.incoming = None
        self.is_complete = True
        self._tell_body()

    def fail_body(self, error: GatewayError) -> None:
        """Take no more of the body."""
        if self._failure is None:
            self._failure = error
        self._is_wanted = False
        if self.incoming is not None:
            self.incoming.discard()
        self._tell_body()

    def check_body(self, elapsed_s: float) -> None:
        """Give up a body that is too large, or too slow. `elapsed_s`: since it was waited for."""
        assert self.incoming is not None
        settings = self.connection.settings
        num_bytes = self.incoming.num_bytes
        if num_bytes > settings.max_body_bytes:
            self.fail_body(self._too_large())
        elif (
            elapsed_s > settings.body_idle_timeout_s and num_bytes < settings.body_min_bytes_per_s * elapsed_s
        ):
            rate = settings.body_min_bytes_per_s
            self.fail_body(RequestTimeout(f"the request body comes at less than {rate} bytes/s"))

    def time_body_out(self) -> None:
        """Nothing of the body has come for too long."""
        limit_s = self.connection.settings.body_idle_timeout_s
        self.fail_body(RequestTimeout(f"no byte of the request body for {limit_s:g} s"))

    def break_body(self) -> None:
        """The framing is wrong."""
        self.fail_body(BadRequest("the request body is not framed correctly"))

    def abandon(self) -> None:
        """The client has gone."""
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None:
            on_gone()
        elif self._on_body is not None:
            self._failure = ConnectionResetError("the client has gone")
            self._tell_body()

    # -- inside

    @property
    def _may_skip_body(self) -> bool:
        """Whether the rest of a body that nobody wants can be read and thrown away."""
        is_coming = self._is_wanted or self.headers.get("expect") is None
        return self._failure is None and is_coming and self.connection.settings.linger_s > 0

    def _tell_body(self) -> None:
        on_body, self._on_body = self._on_body, None
        if on_body is not None:
            on_body()

    def _answer_expectation(self) -> None:
        """Invite the body of a client that waits for it (RFC 9110, 10.1.1)."""
        expectation = self.headers.get("expect")
        if expectation is None or not self.is_http11:
            return
        if expectation.lower() != "100-continue":
            self.fail_body(ExpectationFailed("the only expectation this server can meet is 100-continue"))
            assert self._failure is not None
            raise self._failure
        if self.transport is not None:
            self.transport.write(CONTINUE)

    def _too_large(self) -> BodyTooLarge:
        limit_bytes = self.connection.settings.max_body_bytes
        return BodyTooLarge(
            f"the request body is larger than the limit of {limit_bytes} bytes (max_body_bytes)"
        )

    def _answer_head(
        self, status: int, headers: Iterable[tuple[str, str]], num_bytes: int, keeps_alive: bool
    ) -> bytes:
        lines = [f"HTTP/1.1 {status} {_PHRASES.get(status, '')}"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines.append(f"date: {email.utils.formatdate(usegmt=True)}")
        if status != 204:
            lines.append(f"content-length: {num_bytes}")
        if not keeps_alive:
            lines.append("connection: close")
        elif not self.is_http11:
            lines.append("connection: keep-alive")
        head = "\r\n".join(lines)
        if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1 or "\0" in head:
            raise ValueError("a header of an answer holds a line break or a NUL")
        return f"{head}\r\n\r\n".encode("utf-8", "surrogateescape")
