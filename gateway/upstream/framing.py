"""How an answer's body is delimited, and what is said of one that is delimited wrongly.

llhttp judges the bytes; here is what it leaves open.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.errors import UpstreamError, UpstreamProtocolError, UpstreamTruncated, shown
from gateway.upstream.answer import UpstreamAnswer


class Refused(Exception):
    """Raised inside a parser callback to stop it; its text goes into the error."""


HEAD_TOO_LARGE: Final = "its head is larger than max_response_header_bytes or max_response_headers"


class _Reasons(dict[bytes, bytes]):
    """A reason phrase as it may be passed on: without one that holds control characters, which llhttp lets
    through and a terminal or a client's parser may obey. Backends say the same few again and again."""

    def __missing__(self, reason: bytes) -> bytes:
        clean = reason if _REASON.fullmatch(reason) else b""
        if len(self) < _MAX_REASONS and len(reason) <= _MAX_REMEMBERED_BYTES:
            self[reason] = clean
        return clean


_REASON: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_MAX_REASONS: Final = 256
_MAX_REMEMBERED_BYTES: Final = 64
REASONS: Final = _Reasons()


def read_framing(answer: UpstreamAnswer) -> None:
    """Note how the body ends. Raises Refused. llhttp has refused double and conflicting lengths already."""
    for name, value in answer.headers:
        if name == b"content-length":
            answer.content_length = int(value)
        elif name == b"transfer-encoding":
            if answer.is_chunked or value.strip().lower() != b"chunked":
                coding = shown(value.decode("latin-1"))
                raise Refused(f"its transfer coding `{coding}` is not `chunked` alone")
            answer.is_chunked = True


def framing_error(exc: Exception, *, is_announced: bool) -> UpstreamError:
    """Say what was wrong; once the head has been announced it is too late to try another backend."""
    refusal = exc if isinstance(exc, Refused) else exc.__context__
    reason = str(refusal) if isinstance(refusal, Refused) else f"invalid HTTP/1.1 ({exc})"
    if is_announced:
        return UpstreamTruncated(f"the backend's answer broke off: {reason}")
    return UpstreamProtocolError(f"the backend's answer is not acceptable: {reason}")
