"""Observes a stream of server-sent events: first token, usage, finish reason, id.

The observer gets the bytes that the relay forwards and never changes them. Most events (a token in the middle
of an answer) contain nothing that routing needs. So after the first token, a block of events is only searched
for a few words and decoded if one occurs; such a word in a model's text only costs a decode. Invariant: the
state depends on the bytes, never on how they are split into chunks. An event is a block that ends with a
blank line (WHATWG HTML, 9.2.6), with LF, CRLF or CR; comments count too.

It does not validate and never fails: an event that cannot be decoded is counted and skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from gateway.values import Api, Usage
from gateway.wire.answers import (
    ANTHROPIC_DECODER,
    CHAT_DECODER,
    GENERATE_DECODER,
    RESPONSES_DECODER,
    ChatAnswer,
    error_status,
    finish_reason_of,
)
from gateway.wire.usage import WireUsage, merge_usage

_MAX_EVENT_BYTES: Final = 2 << 20  # a final `response.completed` repeats the whole answer
_LINE_END_BYTES: Final = 4  # bytes that may follow an event before its end is known
_EMPTY_VALUES: Final = (b"", b"null", b'""', b"[]")
# Events that only say that an answer is going to come.
_MESSAGE_OPENINGS: Final = frozenset({"message_start", "ping", "content_block_start"})
_RESPONSES_OPENINGS: Final = frozenset(
    {
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_part.added",
        "response.reasoning_summary_part.added",
    }
)
_UNTOLD: Final = b'"error"'
_KNOWN: Final = frozenset({Api.CHAT, Api.COMPLETIONS, Api.MESSAGES, Api.RESPONSES, Api.GENERATE})
_RESPONSES_ENDS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


class SseObserver:
    """Observes one stream of one API. O(bytes): a dull event, one without news, is only searched."""

    __slots__ = (
        "_decode",
        "_is_dull",
        "_pending",
        "_pending_bytes",
        "error_status",
        "finish_reason",
        "has_content",
        "has_first_token",
        "is_background",
        "is_complete",
        "num_events",
        "response_id",
        "takes_openings_for_content",
        "usage",
    )

    def __init__(self, api: Api) -> None:
        self.has_first_token = False
        self.has_content = api not in _KNOWN  # an event has passed that is more than an opening
        self.takes_openings_for_content = False
        self.error_status: int | None = None  # what the backend reported inside the stream, as a status
        self.is_complete = False  # the dialect's last event was seen
        self.is_background = False  # the answer of a job that outlives its connection
        self.usage = Usage()
        self.finish_reason: str | None = None
        self.response_id: str | None = None
        self.num_events = 0
        self._pending: list[bytes] = []  # the incomplete event, in pieces
        self._pending_bytes = 0
        self._decode: Callable[[SseObserver, bytes], None]  # unbound: a bound one would be a cycle
        self._is_dull: Callable[[bytes], bool]
        if api is Api.MESSAGES:
            self._decode, self._is_dull = SseObserver._see_message, _is_dull_message
        elif api is Api.RESPONSES:
            self._decode, self._is_dull = SseObserver._see_response, _is_dull_response
        elif api is Api.GENERATE:
            self._decode, self._is_dull = SseObserver._see_generate, _is_never_dull
        else:
            self._decode, self._is_dull = SseObserver._see_chat, _is_dull_chat

    @property
    def has_error(self) -> bool:
        """The backend reported an error inside the stream."""
        return self.error_status is not None

    @property
    def is_mid_event(self) -> bool:
        """Whether the bytes so far end inside an event."""
        return self._pending_bytes > 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        if b"\n" not in data and b"\r" not in data and not self._ends_with_carriage_return():
            self._keep(data)
            return
        if self._pending:
            data = b"".join([*self._pending, data])
            self._pending.clear()
            self._pending_bytes = 0
        if b"\r" in data:
            data = _with_line_feeds(data)
        # data: [ complete blocks | incomplete event ]
        #                         ^ end
        end = data.rfind(b"\n\n") + 2
        if end > 1:
            self._take(data[:end])
            data = data[end:]
        self._keep(data.lstrip(b"\n"))

    def _ends_with_carriage_return(self) -> bool:
        """Whether the last byte is a CR, which is half of a CRLF or a line end of its own."""
        return bool(self._pending) and self._pending[-1].endswith(b"\r")

    def _take(self, blocks: bytes) -> None:
        """Process complete blocks; blank lines at the start belong to none."""
        if blocks.startswith(b"\n") or b"\n\n\n" in blocks or not self.has_first_token:
            self._look(blocks)
        elif self._is_dull(blocks):
            self.num_events += blocks.count(b"\n\n")
        else:
            self._look(blocks)

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        self._pending_bytes += len(data)
        if self._pending_bytes <= _MAX_EVENT_BYTES:
            self._pending.append(data)
        else:
            # Too large: drop the content but keep waiting for its end.
            self._pending = [b":", data[-1:]]

    def _look(self, block: bytes) -> None:
        for event in block.split(b"\n\n"):
            event = event.strip(b"\n")
            if not event:
                continue
            self.num_events += 1
            if len(event) > _MAX_EVENT_BYTES - _LINE_END_BYTES:
                continue
            if self.has_first_token and self._is_dull(event):
                continue  # decide per event, or the result would depend on the other events of the block
            payload = payload_of(event)
            if payload is None:
                continue
            if payload == b"[DONE]":
                self.is_complete = self.has_content = True
                continue
            try:
                self._decode(self, payload)
            except (msgspec.DecodeError, RecursionError):
                self.has_content = True  # whatever it is

    def _note_error(self, error: bytes) -> None:
        status = error_status(error)
        if status is not None:
            self.error_status, self.has_content = status, True

    def _note_usage(self, said: WireUsage | None) -> None:
        if said is not None:
            self.usage = merge_usage(self.usage, said)

    def _see_chat(self, payload: bytes) -> None:
        answer = CHAT_DECODER.decode(payload)
        if self.response_id is None:
            self.response_id = answer.id
        if not self.has_first_token:
            self.has_first_token = _has_token(answer)
        if answer.timings is not None:
            self._note_usage(answer.timings.usage)
        self._note_usage(answer.usage)
        reason = finish_reason_of(answer)
        if reason is not None:
            self.finish_reason = reason
        self._note_error(bytes(answer.error))
        if not self.has_content:  # a chunk that opens an answer has choices, and nothing in them
            self.has_content = self.has_first_token or reason is not None or not answer.choices

    def _see_message(self, payload: bytes) -> None:
        event = ANTHROPIC_DECODER.decode(payload)
        kind = event.type
        if kind == "content_block_delta":
            self.has_first_token = True
        elif kind == "message_start" and event.message is not None:
            self.response_id = event.message.id
            self._note_usage(event.message.usage)
        elif kind == "message_delta":
            self._note_usage(event.usage)
            if event.delta is not None and event.delta.stop_reason is not None:
                self.finish_reason = event.delta.stop_reason
        elif kind == "message_stop":
            self.is_complete = True
        elif kind == "error":
            self._note_error(bytes(event.error) or _UNTOLD)
        if kind not in _MESSAGE_OPENINGS:
            self.has_content = True

    def _see_response(self, payload: bytes) -> None:
        event = RESPONSES_DECODER.decode(payload)
        kind = event.type
        if kind.endswith(".delta"):
            self.has_first_token = True
        elif kind == "error":
            self._note_error(bytes(event.error) or payload)
        if kind not in _RESPONSES_OPENINGS or self.takes_openings_for_content:
            self.has_content = True
        if event.response is None:
            return
        self.response_id = event.response.id or self.response_id
        self._note_usage(event.response.usage)
        self.is_background = self.is_background or event.response.background is True
        if kind in _RESPONSES_ENDS:
            self.is_complete = True
            if kind == "response.failed":
                self._note_error(bytes(event.response.error) or _UNTOLD)
            self.finish_reason = event.response.status or kind.rpartition(".")[2]

    def _see_generate(self, payload: bytes) -> None:
        answer = GENERATE_DECODER.decode(payload)
        if answer.text:
            self.has_first_token = True
        self._note_error(bytes(answer.error))
        info = answer.meta_info
        if info is not None:
            self.response_id = info.id or self.response_id
            self.finish_reason = info.reason or self.finish_reason
            self._note_usage(info.usage)
        if answer.text != "" or self.finish_reason is not None:  # an opening has an empty text
            self.has_content = True


def payload_of(event: bytes) -> bytes | None:
    """Return the data of one event: its joined `data` lines, or None if it has none."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = []
    for line in event.split(b"\n"):
        if line.startswith(b"data:"):
            value = line[5:]
            lines.append(value[1:] if value.startswith(b" ") else value)
    return b"\n".join(lines) if lines else None


def _with_line_feeds(data: bytes) -> bytes:
    """Turn CRLF and CR into LF. A CR at the very end stays, because an LF may follow."""
    last = data[-1:] if data.endswith(b"\r") else b""
    return data[: len(data) - len(last)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + last


def _has_token(answer: ChatAnswer) -> bool:
    for choice in answer.choices or ():
        if choice.text:
            return True
        delta = choice.delta
        if delta is not None:
            parts = (delta.content, delta.tool_calls, delta.reasoning_content, delta.reasoning, delta.refusal)
            if any(bytes(part) not in _EMPTY_VALUES for part in parts):
                return True
    return False


def _is_dull_chat(block: bytes) -> bool:
    """Whether no event in the block has a finish reason, usage or error, or is the last one.

    `finish_reason` and `usage` may be present with null, in either spelling that engines use. Any other
    spelling only causes the block to be decoded.
    """
    if block.count(b"error") or block.count(b"[DONE]"):
        return False
    if num_reasons := block.count(b'"finish_reason"'):
        compact = block.count(b'"finish_reason":null')
        if num_reasons != compact and num_reasons != block.count(b'"finish_reason": null'):
            return False
    num_usages = block.count(b'"usage"')
    return not num_usages or num_usages in (block.count(b'"usage":null'), block.count(b'"usage": null'))


def _is_dull_message(block: bytes) -> bool:
    return not (block.count(b"message_") or block.count(b"error"))


def _is_dull_response(block: bytes) -> bool:
    return not (block.count(b'"response"') or block.count(b"error"))


def _is_never_dull(_block: bytes) -> bool:
    return False
