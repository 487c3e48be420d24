"""The answer to one client, written straight to its transport, framed anew.

Decision: one framing path. A body with a known length keeps `content-length`; any other is `chunked`, one
chunk per read of the upstream, head and first bytes in one write; HTTP/1.0 clients get it up to the end of
the connection. So bytes can be added at any chunk boundary (an in-band error, a keep-alive comment) and
the bytes of the body itself are never altered.

What is to leave waits for its stage of the round (`scheduling.rounds`).

Invariants: nothing is written after the end; a body that ends early never looks complete (the connection
closes without a last chunk, or short of its length). With the last byte the connection is told, and may begin
its next request.

Knows nothing of backends: its source is anything that can be paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gateway.downstream.request import ClientRequest
from gateway.scheduling.round_protocol import LARGE_READ_BYTES
from gateway.scheduling.rounds import Stage
from gateway.upstream.exchange import BodySource

SSE_COMMENT = b":\n"
"""A comment line and nothing else: some decoders make an event without data of a blank line behind it."""

# The size lines of chunks as long as one event or a few: to format one costs more than to send it on.
_NUM_SIZE_LINES = 1_024
_SIZE_LINES = tuple(b"%x\r\n" % size for size in range(_NUM_SIZE_LINES))


class ClientRelay:
    """Writes one response. Made when the request is known, used once."""

    __slots__ = (
        "_connection",
        "_content_length",
        "_has_bodyless_answer",
        "_is_answered",
        "_is_chunked",
        "_is_finished",
        "_keeps_alive",
        "_leaving",
        "_request",
        "_silence_timer",
        "_source",
        "_tail",
        "_transport",
        "bytes_sent",
        "has_started",
        "is_event_stream",
    )

    def __init__(self, request: ClientRequest) -> None:
        """Raises ConnectionResetError when the client has gone."""
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        self._request = request
        self._transport = transport
        self._source: BodySource | None = None
        self._leaving: list[bytes] = []  # in the round to come, or under way
        self._is_answered = False  # those are the last bytes
        self._is_chunked = False
        self._content_length: int | None = None
        self.is_event_stream = False
        self._has_bodyless_answer = False
        self._is_finished = False
        self._keeps_alive = False
        self._silence_timer: asyncio.TimerHandle | None = None
        self._tail = b""
        self.has_started = False  # a status has been given to the client: nothing may be retried
        self.bytes_sent = 0  # of the body, without framing
        self._connection = request.connection
        self._connection.relay = self

    # -- for the proxy

    def send_head(
        self,
        status: int,
        reason: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        *,
        content_length: int | None,
        is_event_stream: bool = False,
    ) -> None:
        """Start the answer. `headers` are end-to-end ones; length, coding and connection are added here.

        The head leaves with what comes of the body in the same round, in one write.
        """
        assert not self.has_started
        self.has_started = True
        self.is_event_stream = is_event_stream
        framing = self._choose_framing(status, content_length)
        lines = [b"HTTP/1.1 %d %b\r\n" % (status, reason)]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines.append(framing)
        self._leave(b"".join(lines))
        if is_event_stream and self._connection.settings.sse_keepalive_s is not None:
            self._watch_silence(self._connection.settings.sse_keepalive_s)

    def fail(self, last_bytes: bytes = b"") -> None:
        """End the answer before its time, so that it never looks complete.

        `last_bytes` (an error event) are added where the framing allows it: in chunks. Idempotent.
        """
        if self._is_finished:
            return
        if last_bytes and self._can_add_bytes():
            self._write(last_bytes)
        self._is_finished = True
        self._keeps_alive = False
        self._source = None
        self._stop_watching()
        self._write_leaving()
        if not (self._is_chunked or self._content_length is not None):
            self._connection.abort()  # only a reset differs from the regular end
        self._connection.on_answered(keeps_alive=False)

    def send_comment(self) -> bool:
        """Send an SSE comment, to keep the connection alive or to test it, where no event is cut by it.

        Returns False, and sends nothing, when this is not the place.
        """
        if not (self.is_event_stream and self._can_add_bytes()) or self._is_finished:
            return False
        if self.bytes_sent and not self._tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")):
            return False
        self._write(SSE_COMMENT)
        return True

    # -- BodySink: for the exchange

    def attach(self, source: BodySource) -> None:
        self._source = source
        if self._connection.is_writing_paused:
            source.pause()  # the client has not taken the previous answer yet

    def on_data(self, data: bytes, is_last: bool) -> None:
        """Write body bytes, with the head before them and the end behind them where due."""
        if self._is_finished or self._transport.is_closing():
            return
        if data:
            self.bytes_sent += len(data)
            self._tail = data[-4:] if len(data) >= 4 else (self._tail + data)[-4:]
            if self._has_bodyless_answer:
                data = b""
        if is_last:
            self._end(data)
        elif data:
            self._write(data)
        if len(data) >= LARGE_READ_BYTES:
            self._write_leaving()  # let the transport say when it has enough

    # -- for the connection

    @property
    def survives_fin(self) -> bool:
        return True

    def hold_back(self) -> None:
        """The client reads too slowly."""
        if self._source is not None:
            self._source.pause()

    def let_go(self) -> None:
        if self._source is not None:
            self._source.resume()

    # -- inside

    def _choose_framing(self, status: int, content_length: int | None) -> bytes:
        """Decide how the body ends, whether the connection stays, and say both in header lines."""
        request = self._request
        is_http11 = request.is_http11
        self._has_bodyless_answer = request.method == "HEAD" or status in (204, 304)
        self._content_length = content_length
        self._is_chunked = content_length is None and is_http11 and not self._has_bodyless_answer
        has_end = content_length is not None or self._is_chunked or self._has_bodyless_answer
        self._keeps_alive = has_end and request.may_keep_alive
        lines = b""
        if self._is_chunked:
            lines = b"transfer-encoding: chunked\r\n"
        elif content_length is not None and status != 204:
            lines = b"content-length: %d\r\n" % content_length
        if not self._keeps_alive:
            return lines + b"connection: close\r\n\r\n"
        return lines + (b"\r\n" if is_http11 else b"connection: keep-alive\r\n\r\n")

    def _watch_silence(self, limit_s: float) -> None:
        """Look twice per limit, so that no silence is longer. One timer per stream, none per write."""
        self._silence_timer = asyncio.get_running_loop().call_later(
            limit_s / 2, self._break_silence, limit_s, self.bytes_sent
        )

    def _break_silence(self, limit_s: float, num_bytes_before: int) -> None:
        if self._transport.is_closing():
            return
        if self.bytes_sent == num_bytes_before and not self._connection.is_writing_paused:
            self.send_comment()
        self._watch_silence(limit_s)

    def _stop_watching(self) -> None:
        if self._silence_timer is not None:
            self._silence_timer.cancel()

    def _can_add_bytes(self) -> bool:
        return self.has_started and self._is_chunked and not self._transport.is_closing()

    def _write(self, data: bytes) -> None:
        """One chunk, or raw bytes."""
        if self._is_chunked:
            size = len(data)
            size_line = _SIZE_LINES[size] if size < _NUM_SIZE_LINES else b"%x\r\n" % size
            self._leave(size_line, data, b"\r\n")
        else:
            self._leave(data)

    def _end(self, data: bytes) -> None:
        """The last bytes and the mark of the end."""
        if self._content_length not in (None, self.bytes_sent) and not self._has_bodyless_answer:
            self._keeps_alive = False  # our own answers only: llhttp counts an upstream's bytes
        self._is_finished = self._is_answered = True
        self._source = None
        self._stop_watching()
        if self._is_chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        self._leave(data)

    def _leave(self, *pieces: bytes) -> None:
        """Have bytes leave in this round, in one write with all others of it."""
        if not self._leaving:
            self._connection.rounds.add(Stage.WRITES, self._write_leaving)
        self._leaving += pieces

    def _write_leaving(self) -> None:
        pieces, self._leaving = self._leaving, []
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if data and not self._transport.is_closing():
            self._transport.write(data)
        if self._is_answered:
            self._is_answered = False
            self._connection.on_answered(keeps_alive=self._keeps_alive)
