"""One HTTP/1.1 connection to a backend: bytes in, one answer at a time out.

Decision: httptools (llhttp, strict) is the judge of framing; conflicting lengths, bad chunks and garbage
fail the answer and close the connection. A connection is reused only after a complete answer with
keep-alive, with nothing behind it and the whole request sent.

Invariant: `deadline_s` always says when the current phase is over. The pool's clock compares it, so no
phase (see `phase`) can hang and no timer is made per request:

    IDLE            now + idle_expiry_s            -> closed
    SENT, HEAD      sent + first_byte_timeout_s    -> UpstreamTimeout; header bytes that drip do not help
    BODY, no byte   the same: engines send a stream's head before they compute
    BODY, TUNNEL    last read + idle_timeout_s     -> UpstreamTimeout
    BODY, paused    never: the client is slow, not the backend
    CLOSED          now + GOODBYE_S after `close`, never after `drop`

Knows nothing of pools' bounds, of retries or of clients.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final, Protocol, cast

import httptools

from gateway.errors import (
    UpstreamError,
    UpstreamProtocolError,
    UpstreamReset,
    UpstreamTimeout,
    UpstreamTruncated,
)
from gateway.scheduling.round_protocol import RoundProtocol
from gateway.scheduling.rounds import Rounds, Stage
from gateway.upstream.answer import UpstreamAnswer
from gateway.upstream.framing import HEAD_TOO_LARGE, REASONS, Refused, framing_error, read_framing
from gateway.upstream.lost_peer import notice_lost_peer
from gateway.upstream.phase import NEXT, Phase
from gateway.upstream.settings import UpstreamSettings

GOODBYE_S: Final = 5.0
"""For the TLS closing handshake; without TLS it takes a moment."""
READ_SIZE_BYTES: Final = 262_144
"""What one read of the socket may bring (asyncio and uvloop alike)."""
_IDLE, _SENT, _HEAD, _BODY, _COMPLETE, _TUNNEL, _CLOSED = Phase


class ConnectionOwner(Protocol):
    """The pool, as a connection sees it."""

    def on_idle(self, connection: UpstreamConnection) -> None:
        """The answer is complete and the connection may serve another request."""

    def on_lost(self, connection: UpstreamConnection) -> None: ...


class UpstreamConnection(RoundProtocol):
    """The protocol object of one socket. One answer at a time; no pipelining."""

    __slots__ = (
        "_answer", "_body_pieces", "_has_no_body", "_header_bytes", "_is_head_request", "_is_paused",
        "_keeps_alive", "_loop", "_num_overhead_bytes", "_owner", "_parser", "_settings", "_transport",
        "deadline_s", "has_body", "is_reused", "on_body", "phase",
    )  # fmt: skip

    def __init__(self, owner: ConnectionOwner, settings: UpstreamSettings, rounds: Rounds) -> None:
        super().__init__(rounds, Stage.ANSWERS)
        self._owner = owner
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._answer: UpstreamAnswer | None = None
        self._body_pieces: list[bytes] = []
        self.on_body = self._body_pieces.append  # httptools' callback, without a call of our own
        self._parser = httptools.HttpResponseParser(self)
        self.phase = _IDLE
        self.deadline_s = math.inf
        self.is_reused = False  # it has served a request before the one under way
        self._is_paused = False
        self._is_head_request = False
        self.has_body = self._has_no_body = False
        self._keeps_alive = False  # the complete answer allows another request
        self._header_bytes = 0
        self._num_overhead_bytes = 0

    def __repr__(self) -> str:
        paused = ", paused" if self._is_paused else ""
        return f"<UpstreamConnection {self.phase.name}{paused}>"

    def _enter(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase

    # -- for the pool

    @property
    def is_usable(self) -> bool:
        """Nothing has told us yet that the backend closed this connection."""
        return self._transport is not None and not self._transport.is_closing()

    def start(
        self, answer: UpstreamAnswer, head: bytes, body: bytes, *, is_head_request: bool = False
    ) -> None:
        """Send one request; `answer` gets what comes back."""
        transport = self._transport
        assert transport is not None
        self._enter(_SENT)
        self._answer = answer
        answer.carrier = self
        self._is_head_request = is_head_request
        self.has_body = self._has_no_body = self._keeps_alive = False
        self._header_bytes = self._num_overhead_bytes = 0
        self.deadline_s = self._loop.time() + self._settings.first_byte_timeout_s
        if body:
            transport.writelines((head, body))
        else:
            transport.write(head)

    def expire(self) -> None:
        """The deadline has passed."""
        if self.arrived:
            return
        phase = self.phase
        if phase is _IDLE and self.is_usable:
            self.close()
        elif phase is _SENT or phase is _HEAD:
            limit_s = self._settings.first_byte_timeout_s
            self._fail(UpstreamTimeout(f"the backend sent no response head within {limit_s:g} s"))
        elif phase is _BODY:
            limit_s, where = self._settings.first_byte_timeout_s, "after the head of its answer"
            if self.has_body:
                limit_s, where = self._settings.idle_timeout_s, "in the middle of its answer"
            self._fail(UpstreamTimeout(f"the backend sent nothing for {limit_s:g} s {where}"))
        else:
            self.drop()  # a silent tunnel, or a peer that does not answer our goodbye

    def close(self) -> None:
        """Close a connection that serves nothing; `expire` cuts it when that takes too long."""
        self._enter(_CLOSED)
        self.deadline_s = self._loop.time() + GOODBYE_S
        if self._transport is not None:
            self._transport.close()

    def stop(self) -> None:
        """Close at once, whatever it serves."""
        if self._answer is not None:
            self._fail(self._early_end(None))
        else:
            self.close()

    # -- Carrier: for the answer

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
        """The answer has been given up: the rest of it must reach nobody."""
        self._answer = None
        self.arrived = b""
        self._enter(_CLOSED)
        self.deadline_s = math.inf
        if self._transport is not None:
            self._transport.abort()

    abort = drop

    # -- RoundProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by type
        notice_lost_peer(transport.get_extra_info("socket"), self._settings.unacknowledged_timeout_s)

    def read(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.drop()  # nobody asked: bytes behind a complete answer, or after an abort
            return
        had_head = self.phase is _BODY
        if had_head:
            self.has_body, self.deadline_s = True, self._loop.time() + self._settings.idle_timeout_s
        elif self.phase is _SENT:
            self._enter(_HEAD)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._on_upgrade(answer, data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as exc:
            if self.phase is not _COMPLETE:
                self._fail(framing_error(exc, is_announced=had_head), is_announced=had_head)
                return
            self._keeps_alive = False  # a complete answer with something behind it
        phase = self.phase
        if phase is _BODY and had_head:  # first: a stream passes here once per token
            pieces = self._body_pieces
            if pieces:
                self._num_overhead_bytes = 0
                data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                pieces.clear()
                answer.on_data(data, False)
            else:
                self._count_overhead(len(data), is_announced=True)
        elif phase is _COMPLETE:
            self._push_last(answer, is_announced=had_head)
        elif phase is _BODY:
            self._announce(answer)
        else:
            self._count_overhead(len(data), is_announced=False)

    def _announce(self, answer: UpstreamAnswer) -> None:
        """The head is complete, the answer is not. What came with it may be nothing."""
        answer.on_head()
        data = b"".join(self._body_pieces)
        if data:
            self.has_body, self.deadline_s = True, self._loop.time() + self._settings.idle_timeout_s
        self._body_pieces.clear()
        if self._answer is answer:  # it may have been given up because of its head
            answer.on_data(data, False)

    def eof_received(self) -> None:
        """The backend sends no more: the end of a body without a length, or an early end."""
        self.read_arrived()
        answer = self._answer
        if answer is None:
            return
        if self.phase is _BODY and answer.content_length is None and not answer.is_chunked:
            self._enter(_COMPLETE)
            self._push_last(answer, is_announced=True)
        else:
            self._fail(self._early_end(None))

    def connection_lost(self, exc: Exception | None) -> None:
        self.read_arrived()
        if self._answer is not None:
            self._fail(self._early_end(exc))
        self._enter(_CLOSED)
        self._transport = None
        self.deadline_s = math.inf
        self._owner.on_lost(self)

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        if self.phase is _COMPLETE:
            raise Refused("it sent more than one answer")

    def on_status(self, reason: bytes) -> None:
        answer = self._answer
        if answer is not None:
            answer.reason += reason  # in pieces when the line is cut
            self._header_bytes += len(reason)
            if self._header_bytes > self._settings.max_response_header_bytes:
                raise Refused(HEAD_TOO_LARGE)

    def on_header(self, name: bytes, value: bytes) -> None:
        answer = self._answer
        if self.phase is not _HEAD or answer is None:
            return  # a trailer: hop-by-hop for us, and the head has gone out
        self._header_bytes += len(name) + len(value)
        headers, limits = answer.headers, self._settings
        is_too_long = self._header_bytes > limits.max_response_header_bytes
        if is_too_long or len(headers) >= limits.max_response_headers:
            raise Refused(HEAD_TOO_LARGE)
        headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        answer = self._answer
        if answer is None or self.phase is not _HEAD:
            return
        status = self._parser.get_status_code()
        if status == 101 and answer.may_upgrade:
            return
        if status < 200:
            answer.headers.clear()  # interim: the real answer follows
            answer.reason = b""
            return
        read_framing(answer)
        answer.status, answer.reason = status, REASONS[answer.reason]
        self._enter(_BODY)
        if self._is_head_request or status in (204, 304):
            # llhttp cannot be told that no body follows, so this connection ends here unless llhttp
            # sees that by itself (no length given).
            self._has_no_body = True
            self._enter(_COMPLETE)

    def on_message_complete(self) -> None:
        if self.phase is _BODY:
            self._enter(_COMPLETE)
        if self.phase is _COMPLETE:
            # llhttp forgets this as soon as the callback returns
            self._keeps_alive = self._parser.should_keep_alive()

    # -- ends

    def _on_upgrade(self, answer: UpstreamAnswer, early: bytes) -> None:
        """`101`: from here on the bytes are not HTTP. They wait until somebody takes the transport over."""
        if not answer.may_upgrade:
            self._fail(UpstreamProtocolError("the backend switched protocols without being asked"))
            return
        assert self._transport is not None
        self._enter(_TUNNEL)
        self.touch()
        self._transport.pause_reading()
        answer.status = 101
        answer.early = early
        answer.on_head()

    def take_over(self) -> asyncio.Transport:
        """Give the transport of an upgraded connection away; its new protocol must still report
        `connection_lost` here, so that the pool knows."""
        assert self._transport is not None
        self._answer = None
        self.touch()
        return self._transport

    def touch(self) -> None:
        """A tunnel is alive: its idle time starts again."""
        self.deadline_s = self._loop.time() + self._settings.idle_timeout_s

    def _push_last(self, answer: UpstreamAnswer, *, is_announced: bool) -> None:
        """Let go of a complete answer, then hand over the rest of it."""
        pieces = self._body_pieces
        data = b"" if self._has_no_body else pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._answer = answer.carrier = None
        self._release()
        if not is_announced:
            answer.on_head()
        answer.on_data(data, True)

    def _release(self) -> None:
        """Back to the pool, or closed."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > 0:
            self.drop()  # it answered before it had read everything (an early 413), and may never do so
            return
        if not self._keeps_alive:
            self.close()
            return
        if self._is_paused:
            self._is_paused = False
            transport.resume_reading()
        self._enter(_IDLE)
        self.is_reused = True
        self.deadline_s = self._loop.time() + self._settings.idle_expiry_s
        self._owner.on_idle(self)

    def _fail(self, error: UpstreamError, *, is_announced: bool = True) -> None:
        """Tell the answer, and never use this connection again."""
        answer, has_head = self._answer, self.phase is _BODY
        self.drop()
        if answer is not None:
            answer.carrier = None
            if self._body_pieces and has_head and is_announced:
                answer.on_data(b"".join(self._body_pieces), False)  # good bytes before the bad one
            self._body_pieces.clear()
            answer.on_failure(error)

    def _count_overhead(self, num_bytes: int, *, is_announced: bool) -> None:
        """Bound what arrives without becoming body: an endless head, chunk extension or trailer."""
        self._num_overhead_bytes += num_bytes
        if self._num_overhead_bytes > self._settings.max_response_header_bytes + READ_SIZE_BYTES:
            refusal = Refused("it sent too many bytes of head, chunk sizes or trailers")
            self._fail(framing_error(refusal, is_announced=is_announced))

    def _early_end(self, exc: Exception | None) -> UpstreamError:
        how = "reset" if isinstance(exc, ConnectionError) else "closed"
        is_stale = self.is_reused and self.phase is _SENT
        if self.phase is _BODY:
            return UpstreamTruncated(f"the backend {how} the connection before its answer was complete")
        message = f"the backend {how} the connection before a complete response head"
        return UpstreamReset(message, is_stale=is_stale, was_reset=how == "reset")
