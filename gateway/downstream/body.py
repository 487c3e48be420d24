"""A request body as it arrives: where it ends, and its pieces until then.

Decisions: a body of declared length ends after so many bytes; a chunked one ends where llhttp says so.
Neither takes a byte behind its end, so what follows is the next request's. What one read brings is one piece,
however finely it was chunked; at its peak a body is in memory twice (the pieces and their join).

Pure: knows no socket and no clock.
"""

from __future__ import annotations

from typing import Final

from httptools import HttpParserError, HttpRequestParser

MAX_OVERHEAD_BYTES: Final = 131_072
"""Bytes of chunk sizes, extensions and trailers, beside those that each byte of the body may bring along."""

_MAX_OVERHEAD_PER_BYTE: Final = 16  # a chunk of one byte has five

_HEAD: Final = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
_END: Final = b"\r\n\r\n"  # every chunked body ends so; what ends so need not be its end
_MAX_STEPS: Final = 64


class BrokenBody(Exception):
    """It is not framed correctly: where it ends cannot be known."""


class SizedBody:
    """A body whose length is declared."""

    __slots__ = ("_is_discarded", "_length", "_pieces", "num_bytes")

    def __init__(self, length: int) -> None:
        self._length = length
        self._pieces: list[bytes] = []
        self._is_discarded = False
        self.num_bytes = 0

    @property
    def is_complete(self) -> bool:
        return self.num_bytes == self._length

    def feed(self, data: bytes, at: int = 0) -> int:
        """Take what belongs to the body of `data` from `at` on; return where the rest begins."""
        end = min(len(data), at + self._length - self.num_bytes)
        self.num_bytes += end - at
        if not self._is_discarded:
            self._pieces.append(data if end - at == len(data) else data[at:end])
        return end

    def join(self) -> bytes:
        """All of it so far."""
        return b"".join(self._pieces)

    def discard(self) -> None:
        """Forget the pieces, and those to come."""
        self._is_discarded = True
        self._pieces.clear()


class ChunkedBody:
    """A body in chunks. Trailers are dropped."""

    __slots__ = ("_is_discarded", "_num_overhead", "_parser", "_pieces", "_tail", "is_complete", "num_bytes",
                 "on_body")  # fmt: skip

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # the parser's callback, without a call of our own
        self._is_discarded = False
        self._tail = b""
        self._num_overhead = 0
        self.num_bytes = 0
        self.is_complete = False
        self._parser = HttpRequestParser(self)
        self._parser.feed_data(_HEAD)

    def feed(self, data: bytes, at: int = 0) -> int:
        """Take what belongs to the body of `data` from `at` on; return where the rest begins.

        Raises BrokenBody, also for a request behind the body where finding its beginning costs too much.
        """
        num_pieces = len(self._pieces)
        num_before = self.num_bytes
        start = at
        for step in range(_MAX_STEPS):
            end = self._next_end(data, at) if step < _MAX_STEPS - 1 else len(data)
            part = data[at:end]
            try:
                self._parser.feed_data(part)
            except HttpParserError:
                raise BrokenBody from None
            self._tail = (self._tail + part)[-3:]
            at = end
            if self.is_complete or at == len(data):
                break
        self._merge(num_pieces)
        self._num_overhead += at - start - (self.num_bytes - num_before)
        if self._num_overhead > MAX_OVERHEAD_BYTES + _MAX_OVERHEAD_PER_BYTE * self.num_bytes:
            raise BrokenBody
        return at

    def join(self) -> bytes:
        """All of it so far."""
        return b"".join(self._pieces)

    def discard(self) -> None:
        """Forget the pieces, and those to come."""
        self._is_discarded = True
        self._pieces.clear()

    def on_message_begin(self) -> None:
        """The parser's callback."""
        if self.is_complete:
            raise BrokenBody

    def on_message_complete(self) -> None:
        """The parser's callback."""
        self.is_complete = True

    def _next_end(self, data: bytes, at: int) -> int:
        """Where the body may end: behind the next empty line."""
        over = (self._tail + data[at : at + 3]).find(_END)
        if over >= 0:
            return at + over + len(_END) - len(self._tail)
        found = data.find(_END, at)
        return found + len(_END) if found >= 0 else len(data)

    def _merge(self, num_pieces: int) -> None:
        """Count what one read brought, and make it one piece: small chunks cost more than their bytes."""
        fresh = self._pieces[num_pieces:]
        self.num_bytes += sum(map(len, fresh))
        if self._is_discarded:
            self._pieces.clear()
        elif len(fresh) > 1:
            self._pieces[num_pieces:] = [b"".join(fresh)]
