"""One client connection: bytes in, one request at a time to the handler, answers out.

Requests are served in order. What follows the one that is served waits unparsed; reading stops when that is
more than `MAX_WAITING_BYTES`. `deadline_s` always says when the current phase is over; the clock of
`open_connections` compares it, so no phase can hang and no timer is made per request:

    idle, or an unfinished head     keep_alive_timeout_s    -> closed; 408 when a head has begun
    a body that is waited for       body_idle_timeout_s     -> 408, by the handler
    being answered                  never: that is the handler's business
    what nobody wants to read       linger_s                -> closed
    closing                         write_stall_timeout_s   -> cut off, if nothing moves

Beside it `stall_deadline_s` runs while an answer waits for a client that reads too slowly: one that takes
nothing at all for `write_stall_timeout_s` is cut off. `pause_writing` holds the answer's source back.

A request that cannot be parsed gets a JSON error and a closed connection; what the client is still sending
is thrown away for `linger_s`, because closing with unread bytes would reset the connection and could destroy
the answer before the client has read it. A client that sends FIN: see `half_close`.

Knows nothing of backends, sessions or API dialects.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Final, cast

from gateway.downstream.body import BrokenBody, ChunkedBody, SizedBody
from gateway.downstream.half_close import HalfClose, can_be_probed
from gateway.downstream.head import END_OF_HEAD
from gateway.downstream.open_connections import OpenConnections
from gateway.downstream.refusal import FAILED, TOO_MANY_CONNECTIONS, Refusal, Refused, head_timeout
from gateway.downstream.request import ClientRequest, Relay
from gateway.scheduling.round_protocol import RoundProtocol
from gateway.scheduling.rounds import Stage
from gateway.upstream.lost_peer import notice_lost_peer, reset_on_close

MAX_WAITING_BYTES: Final = 65_536
"""How much of the requests behind the one being served, or of a body that nobody waits for, is read ahead."""
# How many clients beyond the limit may linger; half of the descriptors that `server` keeps in reserve.
NUM_TURNED_AWAY_GENTLY: Final = 32

_CR: Final = 0x0D


class ClientConnection(RoundProtocol):
    """The protocol object of one socket. Made by the server for each accepted one."""

    __slots__ = (
        "_body_wanted_s", "_half_close", "_is_deaf", "_is_reading_paused", "_is_resuming", "_open",
        "_receiving", "_stalled_bytes", "_waiting", "_waiting_at", "deadline_s", "is_writing_paused", "relay",
        "request", "settings", "stall_deadline_s", "transport",
    )  # fmt: skip

    def __init__(self, open_connections: OpenConnections) -> None:
        super().__init__(open_connections.rounds, Stage.REQUESTS)
        self._open = open_connections
        self.settings = open_connections.settings
        self.transport: asyncio.Transport | None = None
        self.request: ClientRequest | None = None  # being served now
        self.relay: Relay | None = None  # its answer, when one is under way
        self._receiving: ClientRequest | None = None  # whose body is not complete
        self._waiting, self._waiting_at = b"", 0  # bytes behind that, from `_waiting_at` on
        self._is_resuming = False  # the next waiting request is about to begin
        self._is_deaf = False  # what comes is thrown away
        self._is_reading_paused = False
        self._half_close: HalfClose | None = None  # the client has sent FIN, and is served still
        self._body_wanted_s, self._stalled_bytes = 0.0, 0
        self.is_writing_paused = False
        self.deadline_s = self.stall_deadline_s = math.inf

    def __repr__(self) -> str:
        what = "served" if self.request is not None else "deaf" if self._is_deaf else "idle"
        return f"<{type(self).__name__} {what}, {len(self._waiting) - self._waiting_at} bytes waiting>"

    # -- for requests and relays

    @property
    def is_leaving(self) -> bool:
        return self._open.is_leaving

    def want_body(self) -> None:
        self._body_wanted_s = now_s = self._open.clock()
        self.deadline_s = now_s + self.settings.body_idle_timeout_s
        self._resume_reading()

    def on_answered(self, *, keeps_alive: bool) -> None:
        request, self.request, self.relay = self.request, None, None
        if request is None:
            return
        request.on_gone = None
        if self._half_close is not None:
            self._half_close.stop()
        if not keeps_alive:
            has_unread = self._receiving is not None or self._is_reading_paused or bool(self._waiting)
            self._end(lingers=has_unread)
        elif self._receiving is not None:
            self._skip_body(self._receiving)
        else:
            self._go_on()

    def hand_over(self, protocol: asyncio.Protocol) -> bytes:
        assert self.transport is not None
        self.read_arrived()
        early, self._waiting, self._waiting_at = self._waiting[self._waiting_at :], b"", 0
        self.transport.set_protocol(protocol)
        self._resume_reading()
        return early

    # -- for the server

    @property
    def is_idle(self) -> bool:
        """Nothing is being served, and nothing waits to be."""
        return not (self.request or self._receiving or self._is_resuming or self._is_deaf or self.arrived)

    def expire(self, now_s: float) -> None:
        """A deadline has passed."""
        transport = self.transport
        if transport is None or self.arrived:
            return
        if transport.is_closing() or self.stall_deadline_s <= now_s:
            self._check_stall(transport, now_s)
        elif self.request is not None:
            self.deadline_s = math.inf
            self.request.time_body_out()
        elif self._waiting and not self._is_deaf:
            self._refuse(head_timeout(self.settings.keep_alive_timeout_s))
        else:
            self.close()

    def close(self) -> None:
        """Close once everything written has left; `expire` cuts it off when that does not move."""
        self._is_deaf = True
        if self.transport is not None:
            self._stalled_bytes = self.transport.get_write_buffer_size()
            self.deadline_s = self._open.clock() + self.settings.write_stall_timeout_s
            self.transport.close()

    def abort(self) -> None:
        """Cut the connection off, with a reset: an end alone would look regular to some clients."""
        if self.transport is not None:
            reset_on_close(self.transport.get_extra_info("socket"))
            self.transport.abort()

    # -- RoundProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by type
        notice_lost_peer(transport.get_extra_info("socket"), self.settings.unacknowledged_timeout_s)
        high = self.settings.write_buffer_bytes
        self.transport.set_write_buffer_limits(high=high, low=high // 4)
        self.deadline_s = self._open.clock() + self.settings.keep_alive_timeout_s
        excess = self._open.add(self)
        if excess > 0:
            self._refuse(TOO_MANY_CONNECTIONS, lingers=excess <= NUM_TURNED_AWAY_GENTLY)

    def connection_lost(self, exc: Exception | None) -> None:
        self.arrived = b""
        self.transport = None
        self.deadline_s = self.stall_deadline_s = math.inf
        self._waiting, self._receiving = b"", None
        if self._half_close is not None:
            self._half_close.stop()
        request, self.request, self.relay = self.request, None, None
        self._open.discard(self)
        if request is not None:
            request.abandon()

    def read(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._receiving is not None:
            self._take_body(self._receiving, data)
        elif self.request is not None or self._is_resuming:
            self._keep_waiting(data)
        elif self._waiting:
            scanned = max(1, len(self._waiting) - len(END_OF_HEAD) + 1)
            data, self._waiting = self._waiting + data, b""
            self._read_head(data, 0, scanned)
        else:
            self._read_head(data, 0, 0)

    def eof_received(self) -> bool:
        """FIN. True keeps our sending side open."""
        self.read_arrived()
        if not self._survives_fin():
            self.close()
            return False
        self._half_close = HalfClose(self)
        if self.request is not None:
            self._half_close.begin()
        return True

    def pause_writing(self) -> None:
        assert self.transport is not None
        self.is_writing_paused = True
        self._stalled_bytes = self.transport.get_write_buffer_size()
        self.stall_deadline_s = self._open.clock() + self.settings.write_stall_timeout_s
        if self.relay is not None:
            self.relay.hold_back()

    def resume_writing(self) -> None:
        self.is_writing_paused = False
        self.stall_deadline_s = math.inf
        if self.relay is not None:
            self.relay.let_go()

    # -- requests

    def _read_head(self, data: bytes, at: int, scanned: int) -> None:
        """Begin the request whose head is in `data` at `at`; its first `scanned` bytes hold no end of it."""
        while data[at] == _CR and data.startswith(b"\r\n", at):  # RFC 9112, 2.2
            at, scanned = at + 2, 0
            if at == len(data):
                return
        end = data.find(END_OF_HEAD, at + scanned) + len(END_OF_HEAD)
        try:
            if end < len(END_OF_HEAD):
                self._keep_unfinished(data[at:], is_new=not scanned)
                return
            request = ClientRequest(self, data[at:end], self._open.head_limits)
        except Refused as refused:
            self._refuse(refused.refusal)
            return
        self.deadline_s = math.inf
        num_bytes = request.content_length
        if num_bytes and end + num_bytes <= len(data):
            request.body = data[end : end + num_bytes]
            end += num_bytes
        elif num_bytes or request.is_chunked:
            request.incoming = SizedBody(num_bytes) if num_bytes else ChunkedBody()
            self.request = self._receiving = request
            self._take_body(request, data[end:])
            self._serve(request)
            return
        request.is_complete = True
        if end < len(data):
            self._waiting, self._waiting_at = data, end
        self._serve(request)

    def _keep_unfinished(self, head: bytes, *, is_new: bool) -> None:
        """Keep the beginning of a head. Raises Refused for one that cannot become good."""
        if head != b"\r":
            self._open.head_limits.check_unfinished(head)
            if is_new:
                self.deadline_s = self._open.clock() + self.settings.keep_alive_timeout_s
        self._waiting, self._waiting_at = head, 0

    def _serve(self, request: ClientRequest) -> None:
        self.request = request
        if self._half_close is not None:
            if not request.is_complete:
                self.close()  # the rest can never come
                return
            if request.is_http11:
                self._half_close.begin()
        try:
            self._open.handler(request)
        except Exception:
            logging.getLogger(__name__).exception("request_handler_failed")
            if self.request is request:
                self._refuse(FAILED)
            else:
                self.abort()

    def _go_on(self) -> None:
        """Make way for the next request."""
        if self._waiting:
            self._is_resuming = True
            asyncio.get_running_loop().call_soon(self._resume)
            return
        if self._is_reading_paused:
            self._resume_reading()
        if self._half_close is not None:
            self.close()
        else:
            self.deadline_s = self._open.clock() + self.settings.keep_alive_timeout_s

    def _resume(self) -> None:
        """Begin the next request that waits: one per turn of the loop, for the others' sake."""
        self._is_resuming = False
        if self.transport is None or self._is_deaf:
            return
        data, at, self._waiting, self._waiting_at = self._waiting, self._waiting_at, b"", 0
        self.deadline_s = self._open.clock() + self.settings.keep_alive_timeout_s
        self._read_head(data, at, 0)
        if len(self._waiting) - self._waiting_at <= MAX_WAITING_BYTES:
            self._resume_reading()
        if self._half_close is not None and self.request is None and not self._is_resuming:
            self.close()

    def _keep_waiting(self, data: bytes) -> None:
        """Bytes behind the request that is being served."""
        self._waiting, self._waiting_at = self._waiting[self._waiting_at :] + data, 0
        if len(self._waiting) > MAX_WAITING_BYTES:
            self._pause_reading()

    # -- bodies that do not come with their head

    def _take_body(self, request: ClientRequest, data: bytes) -> None:
        incoming = request.incoming
        assert incoming is not None
        try:
            end = incoming.feed(data)
        except BrokenBody:
            self._is_deaf = True  # where the next request begins cannot be known
            self.deadline_s, was_answered = math.inf, self.request is None
            request.break_body()
            if was_answered:
                self._end(lingers=True)
            return
        if incoming.is_complete:
            self._receiving = None
            self.deadline_s = math.inf
            if end < len(data):
                self._waiting, self._waiting_at = data, end
            was_answered = self.request is None
            request.complete_body()
            if was_answered:
                self._go_on()
        elif request.is_wanted:
            now_s = self._open.clock()
            self.deadline_s = now_s + self.settings.body_idle_timeout_s
            request.check_body(now_s - self._body_wanted_s)
        elif self.request is not None and incoming.num_bytes > MAX_WAITING_BYTES:
            self._pause_reading()

    def _skip_body(self, request: ClientRequest) -> None:
        """The answer did not need the body: throw the rest away, if that does not take too long."""
        assert request.incoming is not None
        request.incoming.discard()
        self.deadline_s = self._open.clock() + self.settings.linger_s
        self._resume_reading()

    # -- ends

    def _refuse(self, refusal: Refusal, *, lingers: bool = True) -> None:
        """Answer instead of the handler, and close. Where an answer has begun, no other one can follow."""
        if self._open.on_refusal is not None:
            self._open.on_refusal(refusal)
        has_answer = self.relay is not None
        self.request = self.relay = None
        if self.transport is None or has_answer:
            self.abort()
            return
        self.transport.write(refusal.encode())
        self._end(lingers=lingers)

    def _end(self, *, lingers: bool) -> None:
        """Close; before that, perhaps, read what the client is still sending, so that it sees our answer."""
        self._is_deaf = True
        self._waiting, self._receiving = b"", None
        transport = self.transport
        if transport is None:
            return
        can_linger = self.settings.linger_s > 0 and not transport.is_closing() and transport.can_write_eof()
        if not (lingers and can_linger):
            self.close()
            return
        transport.write_eof()
        self.deadline_s = self._open.clock() + self.settings.linger_s
        self._resume_reading()

    def _survives_fin(self) -> bool:
        """Whether a client that has sent FIN may still be served."""
        transport = self.transport
        if transport is None or self._is_deaf or not self.settings.probe_half_closed:
            return False
        if transport.get_extra_info("sslcontext") is not None:
            return False
        if self.request is None:
            return self._is_resuming
        return can_be_probed(self.request, self.relay)

    def _check_stall(self, transport: asyncio.Transport, now_s: float) -> None:
        """Cut off a client that takes nothing at all; one that is slow, but moving, is not."""
        num_bytes = transport.get_write_buffer_size()
        if num_bytes >= self._stalled_bytes:
            self.deadline_s = self.stall_deadline_s = math.inf
            transport.abort()
            return
        self._stalled_bytes = num_bytes
        next_s = now_s + self.settings.write_stall_timeout_s
        if transport.is_closing():
            self.deadline_s, self.stall_deadline_s = next_s, math.inf
        else:
            self.stall_deadline_s = next_s

    def _pause_reading(self) -> None:
        if not self._is_reading_paused and self.transport is not None and not self.transport.is_closing():
            self._is_reading_paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._is_reading_paused and self.transport is not None and not self.transport.is_closing():
            self._is_reading_paused = False
            self.transport.resume_reading()
