"""The head of a request: what its bytes say, or why they are refused.

Decision: llhttp (strict, by httptools) judges every byte of a head. It is fed whole heads only, up to their
empty line, so a head that arrives in pieces is read exactly like one that arrives at once. Framing is judged
here on top, more strictly than llhttp does: one `Host`, one `Content-Length` of digits, or
`Transfer-Encoding: chunked` and nothing else, and never two ways to tell a body's end.

Pure: knows no socket and no body.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from httptools import HttpParserError, HttpParserInvalidMethodError, HttpParserUpgrade, HttpRequestParser
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.downstream.refusal import (
    MALFORMED,
    NOT_HTTP,
    OTHER_VERSION,
    TOO_MANY_FIELDS,
    Refused,
    head_too_large,
    line_too_long,
)
from gateway.downstream.settings import DownstreamSettings
from gateway.wire.header_names import HeaderNames

END_OF_HEAD: Final = b"\r\n\r\n"

_ABSOLUTE_FORM: Final = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*://(?:[^][/?#@:]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?(?:[/?#].*)?"
)
_MAX_PORT: Final = 65_535
_VERSION: Final = re.compile(rb"HTTP/[0-9]\.[0-9]")
# RFC 9112, 3.2: a host with or without a port, or nothing; never a user, a path or a second host.
_HOST_VALUE: Final = re.compile(
    rb"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]{0,5})?"
)

_HOST, _LENGTH, _CODING, _CONNECTION, _REQUEST_ID, _ENCODING, _LEVEL = 1, 2, 3, 4, 5, 6, 7
_ROLES: Final = HeaderNames(
    {
        b"host": _HOST,
        b"content-length": _LENGTH,
        b"transfer-encoding": _CODING,
        b"connection": _CONNECTION,
        b"x-request-id": _REQUEST_ID,
        b"content-encoding": _ENCODING,
        b"x-homing-log-level": _LEVEL,
    }.get
)


class HeadLimits:
    """How large a head may be."""

    __slots__ = ("max_field_bytes", "max_fields", "max_head_bytes", "max_line_bytes")

    def __init__(self, settings: DownstreamSettings) -> None:
        self.max_line_bytes = settings.max_request_line_bytes
        self.max_field_bytes = settings.max_header_field_bytes
        self.max_fields = settings.max_headers
        self.max_head_bytes = settings.max_head_bytes

    def check_unfinished(self, raw: bytes) -> None:
        """Raise Refused for the beginning of a head that cannot become a good one."""
        if len(raw) > self.max_head_bytes:
            raise Refused(head_too_large(self.max_head_bytes))
        line_end = raw.find(b"\r\n", 0, self.max_line_bytes + 2)
        if line_end >= 0:
            _read_request_line(raw[:line_end])
        elif len(raw) > self.max_line_bytes + 1:
            raise Refused(line_too_long(self.max_line_bytes))
        elif not raw[:1].isupper():
            raise Refused(NOT_HTTP)
        num_lines = raw.count(b"\n")
        if num_lines > self.max_fields + 1:
            raise Refused(TOO_MANY_FIELDS)
        if num_lines != raw.count(b"\r\n"):
            raise Refused(MALFORMED)


class RequestHead:
    """A request line and its header fields."""

    __slots__ = (
        "_headers",
        "asks_for_level",
        "content_encoding",
        "content_length",
        "is_chunked",
        "is_http11",
        "keeps_alive",
        "method",
        "raw_headers",
        "raw_path",
        "request_id",
    )

    def __init__(self, raw: bytes, limits: HeadLimits) -> None:
        """`raw` begins with the request line and ends with the empty line. Raises Refused."""
        self.raw_headers: list[tuple[bytes, bytes]] = []  # as received, without the space around values
        self._headers: CIMultiDictProxy[str] | None = None
        self.request_id: bytes | None = None
        self.asks_for_level = False  # an operator may want this request logged in full
        self.content_encoding: str | None = None
        if len(raw) > limits.max_head_bytes:
            raise Refused(head_too_large(limits.max_head_bytes))
        line_end = raw.find(b"\r\n")
        if line_end > limits.max_line_bytes:
            raise Refused(line_too_long(limits.max_line_bytes))
        num_fields = raw.count(b"\n") - 2
        if num_fields > limits.max_fields:
            raise Refused(TOO_MANY_FIELDS)
        self.method, self.raw_path, self.is_http11 = _REQUEST_LINES[raw[:line_end]]
        self._judge(raw)
        if len(self.raw_headers) != num_fields:
            raise Refused(MALFORMED)  # a line that is not one field
        if b" \r\n" in raw or b"\t\r\n" in raw:
            self.raw_headers = [(name, value.strip(b" \t")) for name, value in self.raw_headers]
        if len(raw) > limits.max_field_bytes:
            self._check_fields(limits.max_field_bytes)
        self._read_framing()

    @property
    def path(self) -> str:
        """The decoded path of the target, without its query."""
        path = self.raw_path
        if not path.startswith("/"):
            _, is_absolute, rest = path.partition("://")
            if is_absolute:
                path = "/" + rest.partition("/")[2]
        path = path.partition("#")[0].partition("?")[0]
        return unquote(path) if "%" in path else path

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The fields by name in any case."""
        if self._headers is None:
            self._headers = CIMultiDictProxy(
                CIMultiDict(
                    (name.decode("ascii"), value.decode("utf-8", "surrogateescape"))
                    for name, value in self.raw_headers
                )
            )
        return self._headers

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser's callback."""
        self.raw_headers.append((name, value))

    def _judge(self, raw: bytes) -> None:
        try:
            HttpRequestParser(self).feed_data(raw)
        except HttpParserUpgrade:
            pass  # whether to switch protocols is decided by whoever serves the request
        except HttpParserInvalidMethodError:
            raise Refused(NOT_HTTP) from None
        except HttpParserError:
            raise Refused(MALFORMED) from None

    def _check_fields(self, limit_bytes: int) -> None:
        for name, value in self.raw_headers:
            if len(name) + len(value) > limit_bytes:
                raise Refused(line_too_long(limit_bytes))

    def _read_framing(self) -> None:
        """How the body ends, and whether the connection stays."""
        length: int | None = None
        is_chunked = False
        num_hosts = 0
        connection = b""
        roles = _ROLES
        for name, value in self.raw_headers:
            role = roles[name]
            if role is None:
                continue
            if role == _HOST:
                num_hosts += _HOSTS[value]
            elif role == _REQUEST_ID:
                self.request_id = self.request_id or value
            elif role == _ENCODING:
                before, coding = self.content_encoding, value.decode("latin-1")
                self.content_encoding = coding if before is None else f"{before}, {coding}"
            elif role == _LEVEL:
                self.asks_for_level = True
            elif role == _CONNECTION:
                connection += b"," + value
            elif length is not None or is_chunked:
                raise Refused(MALFORMED)
            elif role == _LENGTH:
                if not value.isdigit():
                    raise Refused(MALFORMED)
                length = int(value)
            elif value.lower() == b"chunked" and self.is_http11:
                is_chunked = True
            else:
                raise Refused(MALFORMED)
        if num_hosts != 1 and (num_hosts or self.is_http11):
            raise Refused(MALFORMED)
        self.content_length, self.is_chunked = length, is_chunked
        self.keeps_alive = _keeps_alive(connection, self.is_http11) if connection else self.is_http11
        if self.method == "CONNECT":  # readers disagree whether what follows is a body, or a tunnel's bytes
            if length is not None or is_chunked:
                raise Refused(MALFORMED)
            self.keeps_alive = False


def _read_request_line(line: bytes) -> tuple[str, str, bool]:
    """Return method, target and whether it is HTTP/1.1, not 1.0. Raises Refused for anything else."""
    parts = line.split(b" ")
    if len(parts) != 3 or not line.isascii() or not line[:1].isupper():
        raise Refused(NOT_HTTP)
    version = parts[2]
    is_http11 = version == b"HTTP/1.1"
    if not is_http11 and version != b"HTTP/1.0":
        raise Refused(OTHER_VERSION if _VERSION.fullmatch(version) else NOT_HTTP)
    if parts[0] == b"PRI":
        raise Refused(OTHER_VERSION)  # HTTP/2's, which llhttp reads as its preface whatever version it names
    method, target = parts[0].decode("ascii"), parts[1].decode("ascii")
    if not target.startswith("/"):
        _check_other_form(method, target)
    elif not target.isprintable():
        raise Refused(MALFORMED)
    return method, target, is_http11


def _check_other_form(method: str, target: str) -> None:
    """Raise Refused unless the target has one of the forms of RFC 9112, 3.2, that the method may have."""
    if method == "CONNECT" or (method == "OPTIONS" and target == "*"):
        return
    absolute = _ABSOLUTE_FORM.fullmatch(target)
    if absolute is None or int(absolute["port"] or 0) > _MAX_PORT or not target.isprintable():
        raise Refused(MALFORMED)


def _keeps_alive(connection: bytes, is_http11: bool) -> bool:
    tokens = {token.strip() for token in connection.lower().split(b",")}
    return b"close" not in tokens and (is_http11 or b"keep-alive" in tokens)


class _RequestLines(dict[bytes, tuple[str, str, bool]]):
    """What request lines say. A gateway meets the same few again and again; remembering changes no answer."""

    def __missing__(self, line: bytes) -> tuple[str, str, bool]:
        meaning = _read_request_line(line)
        if len(line) <= _MAX_REMEMBERED_LINE_BYTES and len(self) < _MAX_REMEMBERED_LINES:
            self[line] = meaning
        return meaning


class _Hosts(dict[bytes, int]):
    """1 for a value that is one host. Raises Refused for any other. Remembered as request lines are."""

    def __missing__(self, value: bytes) -> int:
        if not _HOST_VALUE.fullmatch(value.strip(b" \t")):
            raise Refused(MALFORMED)
        if len(value) <= _MAX_REMEMBERED_LINE_BYTES and len(self) < _MAX_REMEMBERED_LINES:
            self[value] = 1
        return 1


_MAX_REMEMBERED_LINES: Final = 256
_MAX_REMEMBERED_LINE_BYTES: Final = 128
_REQUEST_LINES: Final = _RequestLines()
_HOSTS: Final = _Hosts()
