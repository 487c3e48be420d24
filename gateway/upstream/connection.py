"""One HTTP/1.1 connection to a backend: bytes in, one exchange at a time out.

Decision: httptools (llhttp, strict) is the judge of framing; conflicting lengths, bad chunks and garbage
fail the exchange and close the connection. A connection is reused only after a complete answer with
keep-alive, with nothing behind it and the whole request sent.

Invariant: `deadline_s` always says when the current phase is over; the pool's clock compares it, so no
phase can hang and no timer is made per request:

    idle            now + idle_expiry_s            -> closed
    waiting head    sent + first_byte_timeout_s    -> UpstreamTimeout; header bytes that drip do not help
    body            last read + idle_timeout_s     -> UpstreamTimeout
    body, paused    never: the client is slow, not the backend

Knows nothing of pools' bounds, of retries or of clients.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol, cast

import httptools

from gateway.errors import (
    UpstreamError,
    UpstreamProtocolError,
    UpstreamReset,
    UpstreamTimeout,
    UpstreamTruncated,
)
from gateway.upstream.exchange import Exchange
from gateway.upstream.lost_peer import notice_lost_peer
from gateway.upstream.settings import UpstreamSettings


class ConnectionOwner(Protocol):
    """The pool, as a connection sees it."""

    def on_idle(self, connection: UpstreamConnection) -> None:
        """The answer is complete and the connection may serve another request."""

    def on_lost(self, connection: UpstreamConnection) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """The protocol object of one socket. One exchange at a time; no pipelining."""

    __slots__ = (
        "_body_pieces",
        "_exchange",
        "_has_head",
        "_has_no_body",
        "_header_bytes",
        "_is_head_request",
        "_is_message_complete",
        "_is_paused",
        "_is_reusable",
        "_loop",
        "_num_overhead_bytes",
        "_owner",
        "_parser",
        "_settings",
        "_transport",
        "deadline_s",
        "has_response_bytes",
        "on_body",
    )

    def __init__(
        self, owner: ConnectionOwner, settings: UpstreamSettings, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._owner = owner
        self._settings = settings
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._body_pieces: list[bytes] = []
        self.on_body = self._body_pieces.append  # httptools' callback, without a call of our own
        self._parser = httptools.HttpResponseParser(self)
        self._is_paused = False
        self.deadline_s = math.inf
        self._start_message(is_head_request=False)

    def _start_message(self, *, is_head_request: bool) -> None:
        """Forget the previous answer."""
        self._is_head_request = is_head_request
        self.has_response_bytes = False
        self._has_head = False
        self._has_no_body = False
        self._header_bytes = 0
        self._num_overhead_bytes = 0
        self._is_message_complete = False
        self._is_reusable = False

    # -- for the pool

    @property
    def is_usable(self) -> bool:
        """Nothing has told us yet that the backend closed this connection."""
        return self._transport is not None and not self._transport.is_closing()

    def send(
        self, head: bytes, body: bytes, *, is_head_request: bool, may_upgrade: bool = False
    ) -> tuple[Exchange, asyncio.Future[None]]:
        """Start one exchange. The future is done when the head has come; it raises Upstream errors."""
        assert self._transport is not None
        assert self._exchange is None
        self._start_message(is_head_request=is_head_request)
        head_future = self._loop.create_future()
        exchange = self._exchange = Exchange(self, head_future, self._settings.max_early_body_bytes)
        exchange.may_upgrade = may_upgrade
        self.deadline_s = self._loop.time() + self._settings.first_byte_timeout_s
        if body:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head)
        return exchange, head_future

    def expire(self) -> None:
        """The deadline has passed."""
        if self._exchange is None:
            if self.is_usable:
                self.close()
            else:
                self.drop()  # the peer does not answer our goodbye
        elif not self._has_head:
            limit_s = self._settings.first_byte_timeout_s
            self._fail(UpstreamTimeout(f"the backend sent no response head within {limit_s:g} s"))
        else:
            limit_s = self._settings.idle_timeout_s
            self._fail(
                UpstreamTimeout(f"the backend sent nothing for {limit_s:g} s in the middle of its answer")
            )

    def close(self) -> None:
        """Close a connection that serves nothing; `expire` cuts it when that takes too long."""
        self.deadline_s = self._loop.time() + GOODBYE_S
        if self._transport is not None:
            self._transport.close()

    def stop(self) -> None:
        """Close at once, whatever it serves."""
        if self._exchange is not None:
            self._fail(self._early_end(None))
        else:
            self.close()

    # -- Carrier: for the exchange

    def pause_body(self) -> None:
        if not self._is_paused and self.is_usable:
            assert self._transport is not None
            self._is_paused = True
            self.deadline_s = math.inf
            self._transport.pause_reading()

    def resume_body(self) -> None:
        if self._is_paused and self.is_usable:
            assert self._transport is not None
            self._is_paused = False
            self.deadline_s = self._loop.time() + self._settings.idle_timeout_s
            self._transport.resume_reading()

    def drop(self) -> None:
        """The exchange has been given up: the rest of its answer must reach nobody."""
        self._exchange = None
        self.deadline_s = math.inf
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by type
        notice_lost_peer(transport.get_extra_info("socket"), self._settings.unacknowledged_timeout_s)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.drop()  # nobody asked: bytes behind a complete answer, or after an abort
            return
        had_head = self._has_head
        if had_head:
            self.deadline_s = self._loop.time() + self._settings.idle_timeout_s
        else:
            self.has_response_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._on_upgrade(exchange, data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as exc:
            if not self._is_message_complete:
                self._fail(self._framing_error(exc))
                return
            self._is_reusable = False  # a complete answer with something behind it
        pieces = self._body_pieces
        if self._is_message_complete:
            self._push_last(exchange)
        elif pieces:  # here and not in a function of its own: a stream passes here once per token
            self._num_overhead_bytes = 0
            data = b"".join(pieces)
            pieces.clear()
            exchange.on_data(data, False)
        else:
            self._count_overhead(len(data))
        if self._has_head and not had_head:
            exchange.on_head()

    def eof_received(self) -> None:
        """The backend sends no more: the end of a body without a length, or an early end."""
        exchange = self._exchange
        if exchange is None:
            return
        if self._has_head and exchange.content_length is None and not exchange.is_chunked:
            self._is_message_complete = True
            self._push_last(exchange)
        else:
            self._fail(self._early_end(None))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._exchange is not None:
            self._fail(self._early_end(exc))
        self._transport = None
        self.deadline_s = math.inf
        self._owner.on_lost(self)

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        if self._is_message_complete:
            raise _Refused("it sent more than one answer")

    def on_status(self, reason: bytes) -> None:
        if self._exchange is not None:
            self._exchange.reason += reason  # in pieces when the line is cut

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self._exchange
        if self._has_head or exchange is None:
            return  # a trailer: hop-by-hop for us, and the head has gone out
        self._header_bytes += len(name) + len(value)
        headers = exchange.headers
        if (
            self._header_bytes > self._settings.max_response_header_bytes
            or len(headers) >= self._settings.max_response_headers
        ):
            raise _Refused("its head is larger than max_response_header_bytes or max_response_headers")
        headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        exchange = self._exchange
        if exchange is None or self._is_message_complete:
            return
        status = self._parser.get_status_code()
        if status == 101 and exchange.may_upgrade:
            return
        if status < 200:
            exchange.headers.clear()  # interim: the real answer follows
            exchange.reason = b""
            return
        self._read_framing(exchange)
        exchange.status = status
        self._has_head = True
        self.deadline_s = self._loop.time() + self._settings.idle_timeout_s
        if self._is_head_request or status in (204, 304):
            # llhttp cannot be told that no body follows, so this connection ends here unless llhttp
            # sees that by itself (no length given).
            self._has_no_body = True
            self._is_message_complete = True

    def _read_framing(self, exchange: Exchange) -> None:
        """Note how the body is delimited; llhttp has refused double and conflicting lengths already."""
        for name, value in exchange.headers:
            if name == b"content-length":
                exchange.content_length = int(value)
            elif name == b"transfer-encoding":
                if exchange.is_chunked or value.strip().lower() != b"chunked":
                    raise _Refused(f"its transfer coding {value!r} is not `chunked` alone")
                exchange.is_chunked = True

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_message_complete = True
            # llhttp forgets this as soon as the callback returns
            self._is_reusable = self._parser.should_keep_alive()

    # -- ends

    def _on_upgrade(self, exchange: Exchange, early: bytes) -> None:
        """`101`: from here on the bytes are not HTTP. They wait until somebody takes the transport over."""
        if not exchange.may_upgrade:
            self._fail(UpstreamProtocolError("the backend switched protocols without being asked"))
            return
        assert self._transport is not None
        self._has_head = True
        self._transport.pause_reading()
        exchange.status = 101
        exchange.early = early
        exchange.on_head()

    def take_over(self) -> asyncio.Transport:
        """Give the transport of an upgraded connection away; its new protocol must still report
        `connection_lost` here, so that the pool knows."""
        assert self._transport is not None
        self._exchange = None
        self.touch()
        return self._transport

    def touch(self) -> None:
        """A tunnel is alive: its idle time starts again."""
        self.deadline_s = self._loop.time() + self._settings.idle_timeout_s

    def _push_last(self, exchange: Exchange) -> None:
        """Hand over the rest of a complete answer, and let go of its exchange."""
        data = b"" if self._has_no_body else b"".join(self._body_pieces)
        self._body_pieces.clear()
        self._exchange = None
        self._release()
        exchange.on_data(data, True)

    def _release(self) -> None:
        """Back to the pool, or closed."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > 0:
            self.drop()  # it answered before it had read everything (an early 413), and may never do so
            return
        if not self._is_reusable:
            self.close()
            return
        if self._is_paused:
            self._is_paused = False
            transport.resume_reading()
        self.deadline_s = self._loop.time() + self._settings.idle_expiry_s
        self._owner.on_idle(self)

    def _fail(self, error: UpstreamError) -> None:
        """Tell the exchange, and never use this connection again."""
        exchange, self._exchange = self._exchange, None
        self.drop()
        if exchange is not None:
            if self._body_pieces and self._has_head:
                exchange.on_data(b"".join(self._body_pieces), False)  # good bytes before the bad one
            self._body_pieces.clear()
            exchange.on_failure(error)

    def _count_overhead(self, num_bytes: int) -> None:
        """Bound what arrives without becoming body: an endless head, chunk extension or trailer."""
        self._num_overhead_bytes += num_bytes
        if self._num_overhead_bytes > self._settings.max_response_header_bytes + READ_SIZE_BYTES:
            self._fail(
                self._framing_error(_Refused("it sent too many bytes of head, chunk sizes or trailers"))
            )

    def _framing_error(self, exc: Exception) -> UpstreamError:
        """Say what was wrong; once the head has been announced it is too late to try another backend."""
        refusal = exc if isinstance(exc, _Refused) else exc.__context__
        reason = str(refusal) if isinstance(refusal, _Refused) else f"invalid HTTP/1.1 ({exc})"
        if self._exchange is not None and self._exchange.has_head:
            return UpstreamTruncated(f"the backend's answer broke off: {reason}")
        return UpstreamProtocolError(f"the backend's answer is not acceptable: {reason}")

    def _early_end(self, exc: Exception | None) -> UpstreamError:
        how = "reset" if isinstance(exc, ConnectionError) else "closed"
        if self._has_head:
            return UpstreamTruncated(f"the backend {how} the connection before its answer was complete")
        return UpstreamReset(f"the backend {how} the connection before a complete response head")


GOODBYE_S = 5.0  # for the TLS closing handshake; without TLS it takes a moment
READ_SIZE_BYTES = 262_144  # what one read of the socket may bring (asyncio and uvloop alike)


class _Refused(Exception):
    """Raised inside a parser callback to stop it; its text goes into the error."""
