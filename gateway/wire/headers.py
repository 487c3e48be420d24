"""Decides which headers are forwarded in either direction, and which characters a header may contain.

A backend gets everything that the client sent, except headers of one connection (RFC 9110, 7.6.1, including
names listed by `Connection`), headers that the gateway sets itself (host, framing, request id) and headers
that a client may not set (`x-homing-*`, engine control, forged forwarding). Session headers are forwarded
unchanged, so gateways can be chained. `Accept-Encoding` is dropped, because a compressed answer would hide
its usage.

Invariant: no CR, LF or NUL gets into a head, whatever its origin, so a request cannot become two. Knows
nothing about sockets, or about bodies except their length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from gateway.errors import BadRequest
from gateway.wire.header_names import HeaderNames
from gateway.wire.settings import HeaderSettings

RawHeaders = Sequence[tuple[bytes, bytes]]

_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_SET_BY_US: Final = frozenset({b"accept-encoding", b"content-length", b"expect", b"host", b"x-request-id"})
# SGLang (if it is told to) and Dynamo take a request's name from these before any other. It must be ours.
_ENGINE_NAMES: Final = frozenset({b"x-override-rid", b"x-dynamo-request-id"})
_NOT_ANSWERED: Final = _HOP_BY_HOP | {b"content-length", b"x-request-id", b"x-accel-buffering"}
_FORWARDED: Final = frozenset({b"forwarded", b"x-real-ip"})
CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key", b"api-key"})
"""Where clients put a secret: OpenAI's SDKs use the first, Anthropic's the second, Azure's the third."""
_RANK: Final = b"x-data-parallel-rank"
_UPGRADE: Final = (b"connection: upgrade", b"upgrade: websocket")
_ORDINARY_CONNECTION: Final = frozenset({b"", b"close", b"keep-alive"})
_INTERNAL_PREFIX: Final = b"x-homing-"
# Our own session headers are passed on for the next gateway in a chain.
_PASSED_INTERNAL: Final = frozenset({b"x-homing-session-id", b"x-homing-auxiliary"})

# What happens to a client's header.
_IS_DROPPED: Final = 0
_PASSES: Final = 1
_LISTS: Final = 2  # lists other headers of this connection, and is dropped itself

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestHeads:
    """Builds request heads for backends, with one set of options."""

    def __init__(self, settings: HeaderSettings, *, passes_credentials: bool = True) -> None:
        """`passes_credentials`: forward all that clients send to backends that are given none."""
        dropped = _HOP_BY_HOP | _SET_BY_US | _ENGINE_NAMES
        dropped |= {name.encode() for name in settings.stripped_headers}
        prefixes: tuple[bytes, ...] = (_INTERNAL_PREFIX,)
        if not settings.trust_forwarded_headers:
            dropped |= _FORWARDED
            prefixes += (b"x-forwarded-",)
        self._fates_with_key = _fates(dropped | CREDENTIALS, prefixes)
        self._fates = _fates(dropped, prefixes) if passes_credentials else self._fates_with_key

    def build(
        self,
        method: str,
        target: str,
        raw_headers: RawHeaders,
        *,
        host: str,
        body_length: int | None,
        request_id: str,
        credential: tuple[bytes, bytes] | None = None,
        rank: int | None = None,
        is_upgrade: bool = False,
    ) -> bytes:
        """Return the request head, blank line included.

        `body_length` None means no body; the header `credential` replaces all of the client's; `rank` is that
        of an engine with several, whatever the client wants; `is_upgrade` requests a WebSocket. Raises
        BadRequest if a value contains a line break or NUL. One pass, O(headers).
        """
        fates = self._fates if credential is None else self._fates_with_key
        lines = [
            f"{method} {target} HTTP/1.1\r\nhost: {host}\r\nx-request-id: {request_id}".encode("latin-1")
        ]
        connection = b""
        for header in raw_headers:
            fate = fates[header[0]]
            if fate == _PASSES:
                lines.append(b"%b: %b" % header)
            elif fate == _LISTS:
                connection += b"," + header[1]
        if connection:
            lines = _without_listed(lines, connection)
        if credential is not None:
            lines.append(b"%b: %b" % credential)
        if rank is not None:
            lines = [line for line in lines if not line.lower().startswith(_RANK + b":")]
            lines.append(b"%b: %d" % (_RANK, rank))
        if body_length is not None:
            lines.append(b"content-length: %d" % body_length)
        if is_upgrade:
            lines += _UPGRADE
        head = b"\r\n".join(lines)
        num_breaks = len(lines) + 1  # the first element contains two
        if head.count(b"\n") != num_breaks or head.count(b"\r") != num_breaks or b"\0" in head:
            raise BadRequest("a header contains a line break or a NUL", param="headers")
        return head + b"\r\n\r\n"


def _fates(dropped: frozenset[bytes], prefixes: tuple[bytes, ...]) -> HeaderNames[int]:
    def fate_of(name: bytes) -> int:
        if name in dropped:
            return _LISTS if name == b"connection" else _IS_DROPPED
        return _IS_DROPPED if name.startswith(prefixes) and name not in _PASSED_INTERNAL else _PASSES

    return HeaderNames(fate_of)


def bearer(api_key: str | None) -> tuple[bytes, bytes] | None:
    """Return the header that presents a key to a backend, None without a key."""
    return (b"authorization", f"Bearer {api_key}".encode("latin-1")) if api_key else None


def response_headers(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Return the headers of a backend's answer to forward to the client. Names are in lower case.

    Leaves out framing, which the relay sets, and headers that the gateway sets itself: the request id and
    `x-homing-*`.
    """
    kept = []
    connection = b""
    for header in headers:
        name = header[0]
        if name in _NOT_ANSWERED:
            if name == b"connection":
                connection += b"," + header[1]
        elif not name.startswith(_INTERNAL_PREFIX):
            kept.append(header)
    listed = _listed_names(connection) if connection else None
    return [header for header in kept if header[0] not in listed] if listed else kept


def clean_request_id(value: str | bytes | None) -> str | None:
    """Return the request id if it is safe in headers and logs, or None if a new one must be made."""
    if value is None:
        return None
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    return text if _REQUEST_ID.fullmatch(text) else None


def find_header(headers: RawHeaders, wanted: bytes) -> bytes | None:
    """Return the first value of a header. Names are in lower case on both sides."""
    for name, value in headers:
        if name == wanted:
            return value
    return None


def _without_listed(lines: list[bytes], connection: bytes) -> list[bytes]:
    listed = _listed_names(connection)
    if not listed:
        return lines
    kept = [line for line in lines[1:] if line.partition(b":")[0].lower() not in listed]
    return [lines[0], *kept]


def _listed_names(connection: bytes) -> Iterable[bytes]:
    tokens = {token.strip().lower() for token in connection.split(b",")}
    return tokens - _ORDINARY_CONNECTION
