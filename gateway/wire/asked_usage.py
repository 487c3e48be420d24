"""Asks the engine for the token usage of a stream, and keeps that from a client that has not asked for it.

An engine that is asked (`stream_options.include_usage`) sends one more chunk at the end, with `usage` and an
empty list of choices. That chunk is taken out as a whole, and nothing else: a chunk of usage and content
passes. Whatever else such a client gets has the same bytes as without the question.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from gateway.wire.body_members import with_member
from gateway.wire.sse import payload_of

ASKED_ENGINES: Final = frozenset({"torch", "vllm", "sglang", "trtllm"})
"""Engines that send the chunk when asked and only then. llama.cpp reports in its last chunk anyway
(`timings`), and would move that report into the one that is taken out. Others may refuse the field."""

_MAX_EVENT_BYTES: Final = 16_384
"""A chunk of usage has a few hundred bytes."""
# TensorRT-LLM reports in every chunk unless told not to.
_OPTIONS: Final = b'{"include_usage":true,"continuous_usage_stats":false}'
_NULL: Final = b',"usage":null'


class _Chunk(msgspec.Struct, gc=False):
    choices: list[Raw] | None = None
    usage: dict[str, Raw] | None = None
    error: Raw | None = None


_DECODER: Final = msgspec.json.Decoder(_Chunk)


def with_usage_asked(body: bytes) -> bytes:
    """Return the body of a streamed chat or completion, asking for usage whatever it said of that before."""
    return with_member(body, b"stream_options", _OPTIONS)


class UsageFilter:
    """Takes the chunk out of one stream. Only events that are not complete yet are held back."""

    __slots__ = ("_marks_others", "_pending")

    def __init__(self, engine: str) -> None:
        self._marks_others = engine == "torch"  # our worker adds `"usage":null` to all other chunks if asked
        self._pending = b""  # the beginning of an event

    def feed(self, data: bytes, is_last: bool) -> bytes:
        """Return what the client gets now. O(bytes); whole events without the word are not looked into."""
        if not self._pending and data.endswith(b"\n\n") and b'"usage"' not in data:
            return data
        data, self._pending = self._pending + data, b""
        end = _end_of_events(data)
        events, rest = data[:end], data[end:]
        if len(rest) <= _MAX_EVENT_BYTES and not is_last:
            self._pending, rest = rest, b""
        num_reports = events.count(b'"usage"') - events.count(b'"usage":null')
        if num_reports > 0:
            events = b"".join(event for event in _split(events) if not _is_usage(event))
        if self._marks_others:
            events = events.replace(_NULL, b"")
        return events + rest


def _end_of_events(data: bytes) -> int:
    """Return how many bytes there are up to the last blank line, with LF, CRLF or CR as line ends."""
    return max(data.rfind(end) + len(end) if end in data else 0 for end in (b"\n\n", b"\r\n\r\n", b"\r\r"))


def _split(events: bytes) -> list[bytes]:
    """Split into events, each with the blank line behind it."""
    line_end = b"\r\n" if b"\r\n\r\n" in events else b"\n" if b"\n\n" in events else b"\r"
    return [event + 2 * line_end for event in events.split(2 * line_end)[:-1]]


def _is_usage(event: bytes) -> bool:
    payload = payload_of(event.replace(b"\r\n", b"\n").replace(b"\r", b"\n").strip(b"\n"))
    if payload is None or b'"usage"' not in payload:
        return False
    try:
        chunk = _DECODER.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return False
    return chunk.usage is not None and chunk.choices == [] and chunk.error is None
