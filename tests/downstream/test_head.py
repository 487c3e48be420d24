"""What a request's head says: target, fields, framing and whether the connection stays."""

from __future__ import annotations

import pytest

from gateway.downstream.head import HeadLimits, RequestHead
from gateway.downstream.refusal import Refused
from gateway.downstream.settings import DownstreamSettings

LIMITS = HeadLimits(DownstreamSettings())


def head(line: str = "GET / HTTP/1.1", *fields: str, host: str = "Host: t") -> RequestHead:
    lines = [line, *([host] if host else []), *fields]
    return RequestHead("".join(f"{one}\r\n" for one in lines).encode("latin-1") + b"\r\n", LIMITS)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/a/b?c=d", "/a/b"),
        ("/a%20b%2Fc?x=%20", "/a b/c"),
        ("/a#b?c", "/a"),
        ("/a?b#c", "/a"),
        ("//a//", "//a//"),
        ("/%", "/%"),
        ("http://h:80/p/q?r", "/p/q"),
        ("http://[::1]:80/p", "/p"),
        ("HTTPS://h", "/"),
        ("http://h?q", "/"),
    ],
)
def test_the_path_is_decoded_and_the_target_is_kept(target: str, path: str) -> None:
    """Query, fragment, scheme and host belong to the target, not to the path."""
    read = head(f"GET {target} HTTP/1.1")
    assert (read.raw_path, read.path) == (target, path)


def test_only_options_may_ask_for_the_server_itself() -> None:
    """RFC 9112, 3.2.4."""
    assert head("OPTIONS * HTTP/1.1").raw_path == "*"
    with pytest.raises(Refused):
        head("GET * HTTP/1.1")


@pytest.mark.parametrize(
    ("version", "connection", "keeps_alive"),
    [
        ("1.1", None, True),
        ("1.1", "close", False),
        ("1.1", "Keep-Alive", True),
        ("1.1", "x, Close", False),
        ("1.1", "keep-alive, close", False),
        ("1.0", None, False),
        ("1.0", "close", False),
        ("1.0", "Keep-Alive", True),
        ("1.0", "x,keep-alive", True),
        ("1.0", "keep-alive, close", False),
    ],
)
def test_whether_the_connection_stays(version: str, connection: str | None, keeps_alive: bool) -> None:
    """RFC 9112, 9.3: `close` wins, HTTP/1.0 must ask."""
    fields = () if connection is None else (f"Connection: {connection}",)
    assert head(f"GET / HTTP/{version}", *fields).keeps_alive is keeps_alive


def test_fields_are_kept_as_received_and_found_in_any_case() -> None:
    """Order, case and repetition stay; the space around a value goes."""
    read = head("GET / HTTP/1.1", "X-A:1", "x-a: \t2 \t", "Empty:", "Caf: \xe9")
    assert read.raw_headers == [
        (b"Host", b"t"),
        (b"X-A", b"1"),
        (b"x-a", b"2"),
        (b"Empty", b""),
        (b"Caf", b"\xe9"),
    ]
    assert read.headers.getall("X-a") == ["1", "2"]
    assert read.headers["empty"] == ""
    assert read.headers["caf"].encode("utf-8", "surrogateescape") == b"\xe9"


@pytest.mark.parametrize(
    ("field", "length", "is_chunked"),
    [
        ("X: y", None, False),
        ("Content-Length: 0", 0, False),
        ("content-LENGTH: 0012 ", 12, False),
        ("Transfer-Encoding: chunked", None, True),
        ("transfer-encoding:  CHUNKED", None, True),
    ],
)
def test_how_the_body_ends(field: str, length: int | None, is_chunked: bool) -> None:
    """A length, chunks, or no body."""
    read = head("POST / HTTP/1.1", field)
    assert (read.content_length, read.is_chunked) == (length, is_chunked)


def test_http10_needs_no_host() -> None:
    """HTTP/1.1 does."""
    assert not head("GET / HTTP/1.0", host="").is_http11
    with pytest.raises(Refused):
        head("GET / HTTP/1.1", host="")


@pytest.mark.parametrize("line", ["GET /a HTTP/1.1", "GET /" + "a" * 200 + " HTTP/1.1"])
def test_reading_a_line_again_gives_the_same(line: str) -> None:
    """What is remembered of request lines changes nothing."""
    first, second = head(line), head(line)
    assert (first.method, first.raw_path) == (second.method, second.raw_path)


@pytest.mark.parametrize(
    "beginning",
    [
        b"\x16\x03\x01",
        b"get ",
        b"GET / HTTP/1.1\n",
        b"GET /\r\n",
        b"GET / HTTP/x.0\r\nHo",
        b"GET / HTTP/1.1\r\nHost: t\nX",
    ],
)
def test_what_cannot_become_a_request_is_refused_before_its_end(beginning: bytes) -> None:
    """TLS on a plain port, or a bare line feed: nobody need wait for an empty line."""
    with pytest.raises(Refused) as refused:
        LIMITS.check_unfinished(beginning)
    assert refused.value.refusal.status == 400


@pytest.mark.parametrize(
    "beginning", [b"G", b"GET /" + b"a" * 32_800, b"GET / HTTP/1.1\r\nX: " + b"a" * 65_536]
)
def test_an_unfinished_head_has_the_limits_of_a_whole_one(beginning: bytes) -> None:
    """An endless line, or an endless field, ends with 431."""
    if len(beginning) < 10:
        LIMITS.check_unfinished(beginning)
        return
    with pytest.raises(Refused) as refused:
        LIMITS.check_unfinished(beginning)
    assert refused.value.refusal.status == 431


def test_the_number_of_fields_is_judged_before_they_are_read() -> None:
    """S05: nobody has shown a credential yet, so thousands of tiny fields must not cost their objects."""
    beginning = b"GET / HTTP/1.1\r\nHost: t\r\n" + b"a:\r\n" * 300
    for read in (LIMITS.check_unfinished, lambda raw: RequestHead(raw + b"\r\n", LIMITS)):
        with pytest.raises(Refused) as refused:
            read(beginning)
        assert refused.value.refusal.status == 431


@pytest.mark.parametrize("host", ["", "t", "t:80", "t:", "[::1]:8000", "127.0.0.1", "a_b.c-d", "t.", "xn--a"])
def test_a_host_is_a_host(host: str) -> None:
    """Names, addresses and ports; none for targets that have none."""
    assert head(host=f"Host: {host}").is_http11


@pytest.mark.parametrize(
    "host",
    ["a@b", "t/x", "t?x", "t#x", "a b", "a,b", "[::1]evil", "t:80:80", "t:x", "\xf6", '"t"', "a\\b"],
)
def test_what_is_no_host_is_refused(host: str) -> None:
    """S11: RFC 9112, 3.2: readers would find another host in it."""
    with pytest.raises(Refused) as refused:
        head(host=f"Host: {host}")
    assert refused.value.refusal.status == 400
