"""Answers whose framing is wrong, conflicting or endless: refused, and nothing of them reaches a client."""

from __future__ import annotations

import pytest
from fakes.connection_bench import Bench

from gateway.errors import (
    UpstreamProtocolError,
    UpstreamTruncated,
)
from gateway.upstream.settings import UpstreamSettings


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\ncontent-length: +5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5, 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0x5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999999\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\rb\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\nset-cookie: b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\0b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: \x1b[2J\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\x7fb\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\x1bx: a\r\n\r\n",
        b"HTTP/1.1 200 OK\nx: y\n\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/3.7 200 OK\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    ],
)
async def test_bad_heads_are_refused(head: bytes) -> None:
    """Conflicting or malformed framing is UpstreamProtocolError, and the connection is gone."""
    bench = Bench()
    bench.receive(head)
    bench.end("fin")
    sink, error = await bench.outcome()
    assert isinstance(error, UpstreamProtocolError)
    assert sink.data == []
    assert bench.transport.was_aborted


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhelloXX0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"5\nhello\n0\n\n",
        b"ffffffffffffffffff\r\nhello\r\n",
    ],
)
async def test_bad_chunks_break_off(body: bytes) -> None:
    """A framing error after the head is a truncation: what was good before it has been delivered."""
    bench = Bench()
    bench.receive(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\ngood\r\n", body)
    sink, error = await bench.outcome()
    assert isinstance(error, UpstreamTruncated)
    assert sink.body.startswith(b"good")
    assert not sink.is_ended
    assert bench.transport.was_aborted


async def test_head_limits() -> None:
    """Too many or too large header fields are refused, in one read or in many."""
    limits = UpstreamSettings(max_response_header_bytes=2_000, max_response_headers=20)
    many = b"".join(b"x-%d: y\r\n" % i for i in range(30))
    large = b"x: " + b"y" * 3_000 + b"\r\n"
    for fields in (many, large):
        head = b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n"
        for step in (1, 500, len(head)):
            bench = Bench(limits)
            bench.receive(*(head[start : start + step] for start in range(0, len(head), step)))
            _, error = await bench.outcome()
            assert isinstance(error, UpstreamProtocolError)
            assert "max_response_header" in error.message


@pytest.mark.parametrize(
    ("start", "flood"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 10_000),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 400),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1;", b"y" * 10_000),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\ntrailer: ", b"y" * 10_000),
    ],
    ids=["header", "interim", "chunk extension", "trailer"],
)
async def test_endless_overhead_is_bounded(start: bytes, flood: bytes) -> None:
    """Bytes that never become body end the exchange; memory does not grow with them."""
    bench = Bench()
    bench.receive(start)
    for _ in range(100):
        bench.receive(flood)
    assert bench.transport.was_aborted
    _, error = await bench.outcome()
    assert error is not None


@pytest.mark.parametrize(
    ("reason", "passed_on"),
    [
        (b"OK", b"OK"),
        (b"Caf\xe9 \t!", b"Caf\xe9 \t!"),
        (b"", b""),
        (b"O\0K", b""),
        (b"\x1b[2J", b""),
        (b"O\x7fK", b""),
    ],
)
async def test_a_reason_with_control_characters_is_not_passed_on(reason: bytes, passed_on: bytes) -> None:
    """S10: llhttp lets NUL and ESC through; a client's parser, or a terminal, may obey them."""
    bench = Bench()
    bench.receive(b"HTTP/1.1 200 " + reason + b"\r\ncontent-length: 0\r\n\r\n")
    _, error = await bench.outcome()
    assert error is None
    assert bench.exchange.reason == passed_on


async def test_what_was_wrong_is_told_in_plain_characters() -> None:
    """S10: a backend's words go into our errors and logs: bounded, nothing that a terminal obeys."""
    bench = Bench()
    coding = b"\xc2\x85\x9b2J" + b"x" * 5_000
    bench.receive(b"HTTP/1.1 200 OK\r\ntransfer-encoding: " + coding + b", chunked\r\n\r\n")
    _, error = await bench.outcome()
    assert isinstance(error, UpstreamProtocolError)
    assert error.message.isprintable()
    assert len(error.message) < 400


async def test_a_reason_counts_as_head() -> None:
    """S10: also where no field follows, and when it comes in pieces."""
    bench = Bench(UpstreamSettings(max_response_header_bytes=2_000))
    bench.receive(b"HTTP/1.1 200 ")
    for _ in range(21):
        bench.receive(b"a" * 100)
    _, error = await bench.outcome()
    assert isinstance(error, UpstreamProtocolError)
    assert "max_response_header_bytes" in error.message
