"""One request's answer, as the proxy sees it: head first, then the body pushed into a sink.

Invariants: the bytes of the body reach the sink unaltered and in order; what one read of the socket
brought is pushed in one call; when the whole answer is here already, `relay` does not suspend. After the
end, or after `abort`, this object holds no connection, so it cannot touch the next request's answer.
Knows nothing of HTTP framing (see `connection`) and nothing of clients.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.errors import UpstreamError, UpstreamReset


class BodySource(Protocol):
    """What a sink may do with its source: hold it back while its own reader is slow. Both idempotent."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class BodySink(Protocol):
    """Takes a body as it comes. Calls are synchronous, so a sink must not block."""

    def attach(self, source: BodySource) -> None:
        """Called once, before any data."""

    def on_data(self, data: bytes, is_last: bool) -> None:
        """Take the next bytes. Called once at the start of a relay, perhaps with no bytes, so that a sink
        that held back its head to save a system call lets it go now."""


class Carrier(Protocol):
    """The connection below, as far as an exchange needs it."""

    def pause_body(self) -> None: ...

    def resume_body(self) -> None: ...

    def drop(self) -> None: ...

    def take_over(self) -> asyncio.Transport: ...

    def touch(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


class Exchange:
    """The answer to one request. Made by `UpstreamPool.open` when its head is complete."""

    __slots__ = (
        "_carrier",
        "_end",
        "_error",
        "_head",
        "_is_complete",
        "_max_early_bytes",
        "_num_early_bytes",
        "_pending",
        "_sink",
        "content_length",
        "early",
        "headers",
        "is_chunked",
        "may_upgrade",
        "reason",
        "status",
    )

    def __init__(self, carrier: Carrier, head: asyncio.Future[None], max_early_bytes: int) -> None:
        self._carrier: Carrier | None = carrier
        self._head = head
        self._end: asyncio.Future[None] | None = None
        self._sink: BodySink | None = None
        self._pending: list[bytes] = []
        self._num_early_bytes = 0
        self._max_early_bytes = max_early_bytes
        self._is_complete = False
        self._error: UpstreamError | None = None
        self.status = 0
        self.reason = b""
        self.headers: list[tuple[bytes, bytes]] = []  # names in lower case, as received otherwise
        self.is_chunked = False
        self.content_length: int | None = None
        self.may_upgrade = False
        self.early = b""  # bytes of the new protocol that came with a 101

    @property
    def is_complete(self) -> bool:
        """The whole body has arrived (it may still wait to be relayed)."""
        return self._is_complete

    # -- for the proxy

    async def relay(self, sink: BodySink) -> None:
        """Push the body into `sink` until its end.

        Raises UpstreamTruncated or UpstreamTimeout when the body ends early; what came before has been
        pushed. Cancelling aborts the exchange.
        """
        sink.attach(self)
        pending, self._pending = self._pending, []
        sink.on_data(pending[0] if len(pending) == 1 else b"".join(pending), self._is_complete)
        if self._error is not None:
            raise self._error
        if self._is_complete:
            return
        self._sink = sink
        if self._num_early_bytes > self._max_early_bytes:
            self.resume()  # on_early_data had stopped the reading
        self._end = asyncio.get_running_loop().create_future()
        try:
            await self._end
        except BaseException:
            self.abort()
            raise

    async def read(self, limit_bytes: int) -> bytes:
        """The whole body, for small answers. Raises UpstreamError when it is longer than `limit_bytes`."""
        collector = _Collector(self, limit_bytes)
        await self.relay(collector)
        return b"".join(collector.pieces)

    def fail(self, error: UpstreamError) -> None:
        """Close the connection and make the relay that runs, or is to come, raise `error`."""
        carrier = self._carrier
        self.on_failure(error)
        if carrier is not None:
            carrier.drop()

    def take_over(self) -> tuple[Carrier, asyncio.Transport]:
        """Of an upgraded exchange (status 101): its connection and the transport, which is not read yet.

        The new protocol must call the connection's `connection_lost`, and `touch` when bytes pass.
        Raises UpstreamReset when the backend has closed meanwhile.
        """
        carrier, self._carrier = self._carrier, None
        if self.status != 101 or carrier is None:
            raise UpstreamReset("the backend closed the connection right after its upgrade")
        return carrier, carrier.take_over()

    def abort(self) -> None:
        """Stop at once and close the connection, unless the answer is complete. Idempotent."""
        self._error = self._end = None  # they know who waited, who knows us: leave no cycle to the collector
        self._sink = None
        self._pending = []
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.drop()

    def pause(self) -> None:
        if self._carrier is not None:
            self._carrier.pause_body()

    def resume(self) -> None:
        if self._carrier is not None:
            self._carrier.resume_body()

    # -- for the connection

    @property
    def has_head(self) -> bool:
        """The head has been announced: whoever sent the request may have acted on it."""
        return self._head.done()

    def on_head(self) -> None:
        """The head's fields are filled in."""
        if not self._head.done():
            self._head.set_result(None)

    def on_data(self, data: bytes, is_last: bool) -> None:
        """Body bytes from one read; `is_last` when they complete the body."""
        sink = self._sink
        if is_last:
            self._is_complete = True
            self._carrier = None
        if sink is None:
            self._keep_early(data, is_last)
            return
        sink.on_data(data, is_last)
        if is_last:
            self._sink = None
            if self._end is not None and not self._end.done():  # done: the sink refused the last bytes
                self._end.set_result(None)

    def on_failure(self, error: UpstreamError) -> None:
        """The connection is gone, or must go, before the answer was complete."""
        self._error = error
        self._carrier = None
        self._sink = None
        waiter = self._head if not self._head.done() else self._end
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _keep_early(self, data: bytes, is_last: bool) -> None:
        """Hold what came together with the head, or soon after, until somebody relays it."""
        if data:
            self._pending.append(data)
            self._num_early_bytes += len(data)
        if not is_last and self._num_early_bytes > self._max_early_bytes:
            self.pause()


class _Collector:
    """Sink that keeps a body of bounded size."""

    def __init__(self, exchange: Exchange, limit_bytes: int) -> None:
        self.pieces: list[bytes] = []
        self._exchange = exchange
        self._limit_bytes = limit_bytes
        self._num_bytes = 0

    def attach(self, source: BodySource) -> None:
        """Never holds its source back: memory is bounded by the limit."""

    def on_data(self, data: bytes, is_last: bool) -> None:
        self._num_bytes += len(data)
        if self._num_bytes <= self._limit_bytes:
            self.pieces.append(data)
        else:
            self.pieces.clear()
            error = UpstreamError(f"the backend's answer is longer than {self._limit_bytes} bytes")
            self._exchange.fail(error)
