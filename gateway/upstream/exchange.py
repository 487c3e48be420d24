"""An answer for code that awaits: head first, then the body pushed into a sink.

Invariants: the bytes of the body reach the sink unaltered and in order; what one read of the socket
brought is pushed in one call; when the whole answer is here already, `relay` does not suspend. After the
end, or after `abort`, this object holds no connection, so it cannot touch the next request's answer.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.errors import UpstreamError
from gateway.upstream.answer import UpstreamAnswer


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
        that holds its head back lets it go now."""


class Exchange(UpstreamAnswer):
    """The answer to one request. Returned by `UpstreamPool.open` when its head is complete."""

    __slots__ = (
        "_end",
        "_error",
        "_head",
        "_max_early_bytes",
        "_num_early_bytes",
        "_pending",
        "_sink",
        "is_complete",
    )

    def __init__(self, head: asyncio.Future[None], max_early_bytes: int) -> None:
        """`head` is done when the head has come; it raises what `on_failure` was told before."""
        super().__init__()
        self._head: asyncio.Future[None] | None = head
        self._end: asyncio.Future[None] | None = None
        self._sink: BodySink | None = None
        self._pending: list[bytes] = []
        self._num_early_bytes = 0
        self._max_early_bytes = max_early_bytes
        self._error: UpstreamError | None = None
        self.is_complete = False  # the whole body has arrived; it may still wait to be relayed

    # -- for whoever awaits

    async def head_arrived(self) -> Exchange:
        """Return itself when the head is complete. Raises UpstreamError; cancelling aborts the exchange."""
        head = self._head
        assert head is not None
        try:
            await head
        except BaseException:
            self.abort()
            del head, self  # the error knows this place: leave no cycle to the collector
            raise
        return self

    async def relay(self, sink: BodySink) -> None:
        """Push the body into `sink` until its end.

        Raises UpstreamTruncated or UpstreamTimeout when the body ends early; what came before has been
        pushed. Cancelling aborts the exchange.
        """
        sink.attach(self)
        pending, self._pending = self._pending, []
        sink.on_data(pending[0] if len(pending) == 1 else b"".join(pending), self.is_complete)
        if self._error is not None:
            raise self._error
        if self.is_complete:
            return
        self._sink = sink
        if self._num_early_bytes > self._max_early_bytes:
            self.resume()  # _keep_early had stopped the reading
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
        carrier, self.carrier = self.carrier, None
        self.on_failure(error)
        if carrier is not None:
            carrier.drop()

    def abort(self) -> None:
        """Stop at once and close the connection, unless the answer is complete. Idempotent."""
        self._error = self._end = self._head = (
            None  # they know who waited, who knows us: leave no cycle to the collector
        )
        self._sink = None
        self._pending = []
        super().abort()

    # -- called by the connection

    def on_head(self) -> None:
        if self._head is not None and not self._head.done():
            self._head.set_result(None)

    def on_data(self, data: bytes, is_last: bool) -> None:
        sink = self._sink
        if is_last:
            self.is_complete = True
        if sink is None:
            self._keep_early(data, is_last)
            return
        sink.on_data(data, is_last)
        if is_last:
            self._sink = None
            if self._end is not None and not self._end.done():  # done: the sink refused the last bytes
                self._end.set_result(None)

    def on_failure(self, error: UpstreamError) -> None:
        self._error = error
        self._sink = None
        waiter = self._head if self._head is not None and not self._head.done() else self._end
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
