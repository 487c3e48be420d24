"""What the listener accepts, other readers of HTTP/1.1 read as the same method, target, fields and body.

A request that two readers in a row understand differently is smuggled past the first one. Here ours is
compared with h11, and with llhttp as httptools runs it, over heads built from the pieces that such attacks
use, and over mutations of good ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import h11
import httptools
from fuzz.mutations import mutated
from fuzz.test_parsers import bounded
from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.downstream.body import BrokenBody, ChunkedBody
from gateway.downstream.head import END_OF_HEAD, HeadLimits, RequestHead
from gateway.downstream.refusal import Refused
from gateway.downstream.settings import DownstreamSettings

FRAMING = (b"content-length", b"transfer-encoding")  # h11 tells these as it understood them
LIMITS = HeadLimits(DownstreamSettings())
GOOD = [
    b"POST /a HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /a HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nX: y\r\n\r\n",
    b"GET http://t/a?b HTTP/1.0\r\nHost: t\r\nConnection: keep-alive\r\n\r\n",
]
NEXT = b"GET /smuggled HTTP/1.1\r\nHost: t\r\n\r\n"

LINES = st.sampled_from(
    [b"POST / HTTP/1.1", b"POST /a?b=c HTTP/1.1", b"GET / HTTP/1.0", b"POST http://t/a HTTP/1.1"] * 6
    + [
        b"PRI * HTTP/2.0", b"PRI / HTTP/1.0", b"OPTIONS * HTTP/1.1", b"GET /", b"get / HTTP/1.1",
        b"GET  / HTTP/1.1",
        b"GET\t/ HTTP/1.1", b"GET / HTTP/2.0", b"GET / HTTP/0.9", b"GET / http/1.1", b"GET / HTTP/1.1 ",
        b"GET /\x80 HTTP/1.1", b"GET /\x0b HTTP/1.1", b"GET a HTTP/1.1", b"GET //t/a HTTP/1.1",
        b"GET /a#b HTTP/1.1",
        b"GET http://u@t/a HTTP/1.1", b"CONNECT t:80 HTTP/1.1", b"G\x00T / HTTP/1.1", b"GET / HTTP/1.10",
    ]
)  # fmt: skip
LENGTHS = st.sampled_from(
    [
        b"0",
        b"5",
        b"05",
        b"+5",
        b"-5",
        b"5, 5",
        b"5,6",
        b"0x5",
        b"5 5",
        b"5\x0b",
        b"\xb2",
        b"5;",
        b"1_0",
        b"5" * 23,
    ]
)
CODINGS = st.sampled_from(
    [
        b"chunked", b"Chunked", b"chunked ", b"gzip, chunked", b"chunked, gzip", b"identity",
        b"identity, chunked",
        b"xchunked", b"chunked;q=1", b'"chunked"', b"chunked, chunked", b"", b"chunked\x0b", b",chunked",
    ]
)  # fmt: skip
OTHERS = st.sampled_from(
    [
        b"Host: t", b"Host: u@t", b"Host: t,u", b"Connection: close", b"Connection: upgrade",
        b"Upgrade: websocket",
        b"Expect: 100-continue", b"X: a\x00b", b"X: a\rb", b"X: a\nContent-Length: 5", b"X: a\r\n b",
        b"X:\x1b[2J",
        b"X", b": 1", b" X: 1", b"X : 1", b"X\x00: 1", b"Trailer: Content-Length", b"TE: chunked",
        b"X:", b"X:\t a \t",
    ]
)  # fmt: skip
LENGTH_NAMES = st.sampled_from(
    [b"Content-Length: "] * 5
    + [
        b"content-length:",
        b"Content-Length :",
        b"Content_Length: ",
        b" Content-Length: ",
        b"Content-Length\x0b: ",
    ]
)
CODING_NAMES = st.sampled_from(
    [b"Transfer-Encoding: "] * 5
    + [b"transfer-encoding:", b"Transfer-Encoding :", b"Transfer-Encoding\t:", b"X\r\n Transfer-Encoding: "]
)
FIELDS = st.one_of(
    st.builds(bytes.__add__, LENGTH_NAMES, LENGTHS), st.builds(bytes.__add__, CODING_NAMES, CODINGS), OTHERS
)
ENDS = st.sampled_from([b"\r\n"] * 20 + [b"\n", b"\r", b"\r\r\n", b"\n\r\n"])
CHUNKS = st.sampled_from(
    [
        b"5\r\nhello\r\n", b"5;a=b\r\nhello\r\n", b"05\r\nhello\r\n", b"5\nhello\n", b"5 \r\nhello\r\n",
        b"+5\r\nhello\r\n", b"0x5\r\nhello\r\n", b"5\r\nhelloXX", b"5;a\nb\r\nhello\r\n",
        b"A\r\n0123456789\r\n",
        b"",
    ]
)  # fmt: skip
GOOD_CHUNKS = st.binary(min_size=1, max_size=20).map(lambda data: b"%x\r\n%b\r\n" % (len(data), data))
LAST_CHUNKS = st.sampled_from(
    [b"0\r\n\r\n"] * 4
    + [
        b"0\r\nX: y\r\n\r\n",
        b"0\r\nContent-Length: 9\r\n\r\n",
        b"00\r\n\r\n",
        b"0\r\n",
        b"0;a\r\n\r\n",
        b"0\r\nX\r\n\r\n",
    ]
)
BODIES = st.one_of(st.sampled_from([b"", b"hello"]), st.builds(bytes.__add__, CHUNKS, LAST_CHUNKS))


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request line, mostly a good host, a few doubtful fields and a body."""
    fields = [b"Host: t\r\n"] if draw(st.integers(0, 9)) else []
    fields += [draw(FIELDS) + draw(ENDS) for _ in range(draw(st.integers(0, 3)))]
    return draw(LINES) + draw(ENDS) + b"".join(draw(st.permutations(fields))) + b"\r\n" + draw(BODIES)


@st.composite
def framed(draw: st.DrawFn) -> bytes:
    """A request that is good but for at most one field, the size of its body and its chunks."""
    good = st.sampled_from([b"", b"", b"X: y\r\n", b"Expect: 100-continue\r\n"])
    doubtful = draw(good | FIELDS.map(_line))
    length = b"Content-Length: %d\r\n" % draw(st.integers(0, 40))
    framing = draw(st.sampled_from([length, b"Transfer-Encoding: chunked\r\n"]))
    fields = b"".join(draw(st.permutations([b"Host: t\r\n", framing, doubtful])))
    chunks = b"".join(draw(st.lists(GOOD_CHUNKS | CHUNKS, max_size=3))) + draw(LAST_CHUNKS)
    return b"POST /a HTTP/1.1\r\n" + fields + b"\r\n" + (b"hello" if framing == length else chunks)


def _line(field: bytes) -> bytes:
    return field + b"\r\n"


@dataclass(frozen=True)
class Reading:
    """What a reader says of the first request, and where it ends; None for the body: it has not ended."""

    method: bytes
    target: bytes
    fields: tuple[tuple[bytes, bytes], ...]
    body: bytes | None
    num_behind: int


def ours(data: bytes) -> Reading | None:
    """None: refused, or not a whole head."""
    end = data.find(END_OF_HEAD) + len(END_OF_HEAD)
    if end < len(END_OF_HEAD):
        return None
    try:
        head = RequestHead(data[:end], LIMITS)
    except Refused:
        return None
    body: bytes | None = data[end : end + (head.content_length or 0)]
    rest = len(data) - end - len(body or b"")
    if head.content_length is not None and len(body or b"") < head.content_length:
        body, rest = None, 0
    if head.is_chunked:
        chunked = ChunkedBody()
        try:
            rest = len(data) - chunked.feed(data, end)
        except BrokenBody:
            return None
        body = chunked.join() if chunked.is_complete else None
    fields = tuple((name.lower(), value) for name, value in head.raw_headers if name.lower() not in FRAMING)
    return Reading(head.method.encode(), head.raw_path.encode(), fields, body, rest)


def of_h11(data: bytes) -> Reading | None:
    """None: refused."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    request, body, is_complete = None, b"", False
    try:
        while not is_complete:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                is_complete = True
            else:
                break
    except h11.RemoteProtocolError:
        return None
    if request is None:
        return None
    rest = len(connection.trailing_data[0]) if is_complete else 0
    fields = tuple((bytes(name), bytes(value)) for name, value in request.headers if name not in FRAMING)
    return Reading(request.method, request.target, fields, body if is_complete else None, rest)


class _Listener:
    def __init__(self) -> None:
        self.target, self.body, self.is_in_body, self.is_complete = b"", b"", False, False
        self.fields: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        if not self.is_complete:
            self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_in_body:  # there it is a trailer
            self.fields.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.is_in_body = True

    def on_body(self, body: bytes) -> None:
        if not self.is_complete:
            self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


def of_llhttp(data: bytes) -> Reading | None:
    """None: refused before its end."""
    listener = _Listener()
    parser = httptools.HttpRequestParser(listener)
    index = 0
    for index in range(len(data)):  # one byte at a time: stop at the first request's end
        try:
            parser.feed_data(data[index : index + 1])
        except httptools.HttpParserUpgrade:
            break
        except httptools.HttpParserError:
            return None
        if listener.is_complete:
            break
    if not listener.target:
        return None
    body, rest = (listener.body, len(data) - index - 1) if listener.is_complete else (None, 0)
    fields = tuple((name, value) for name, value in listener.fields if name not in FRAMING)
    return Reading(parser.get_method(), listener.target, fields, body, rest)


@bounded
@given(st.one_of(requests(), framed(), framed(), mutated(GOOD)))
def test_no_reader_finds_another_request(request: bytes) -> None:
    """Method, target, fields, body, and where the next request begins."""
    data = request + NEXT
    mine = ours(data)
    assume(mine is not None)
    assert mine is not None
    theirs = of_h11(data)
    if theirs is not None:
        assert mine == theirs
    assert mine == of_llhttp(data)
