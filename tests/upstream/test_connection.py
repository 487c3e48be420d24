"""UpstreamConnection without sockets: what any sequence of received bytes does to one exchange."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest
from fakes.connection_bench import CHUNKED, CLOSE_DELIMITED, INTERIM, SIZED, Bench, Sink
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import (
    UpstreamError,
    UpstreamReset,
    UpstreamTimeout,
    UpstreamTruncated,
)
from gateway.upstream.settings import UpstreamSettings


def partition(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted({cut % len(data) for cut in cuts} - {0}), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds)]


@settings(max_examples=150, deadline=None)
@given(answer=st.sampled_from([SIZED, CHUNKED, INTERIM]), cuts=st.lists(st.integers(0, 10_000), max_size=12))
def test_any_chunking_gives_the_same_answer(answer: bytes, cuts: list[int]) -> None:
    """However the bytes are cut into reads, status, headers, body and reuse are the same."""

    async def check() -> None:
        bench = Bench()
        bench.receive(*partition(answer, cuts))
        sink, error = await bench.outcome()
        assert error is None
        assert sink.is_ended
        assert bench.exchange.status == 200
        assert bench.exchange.reason == b"OK"
        assert sink.body == (b"data: 1\n\ndata: 2\n\n" if answer is CHUNKED else b"hello world")
        assert bench.exchange.headers[0][0] == b"content-type"
        assert len(bench.exchange.headers) == 2
        assert bench.is_reusable

    asyncio.run(check())


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("answer", [SIZED, CHUNKED, INTERIM], ids=["sized", "chunked", "interim"])
async def test_every_cut_is_noticed(answer: bytes, how: str) -> None:
    """An end after n bytes, for every n: a reset before the head is complete, truncated after it."""
    for num_bytes in range(len(answer)):
        bench = Bench()
        bench.receive(answer[:num_bytes])
        bench.end(how)
        sink, error = await bench.outcome()
        has_head = bench.exchange.status == 200
        assert isinstance(error, UpstreamTruncated if has_head else UpstreamReset), num_bytes
        assert not sink.is_ended
        assert b"hello world".startswith(sink.body) or b"data: 1\n\ndata: 2\n\n".startswith(sink.body)
        assert bench.owner.num_idle == 0
        assert bench.owner.num_lost == 1


async def test_close_delimited_body_tells_fin_from_rst() -> None:
    """Without a length, FIN is the end and RST is a truncation."""
    for how, is_complete in (("fin", True), ("rst", False)):
        bench = Bench()
        bench.receive(CLOSE_DELIMITED)
        bench.end(how)
        sink, error = await bench.outcome()
        assert sink.body == b"until the end"
        assert sink.is_ended is is_complete
        assert (error is None) is is_complete
        assert bench.owner.num_idle == 0


async def test_surplus_bytes_prevent_reuse() -> None:
    """A second answer behind the first one reaches nobody; the first is delivered in full."""
    for surplus in (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil", b"x", b"\x00"):
        bench = Bench()
        bench.receive(SIZED + surplus)
        sink, error = await bench.outcome()
        assert error is None
        assert sink.body == b"hello world"
        assert bench.owner.num_idle == 0
        assert bench.transport.is_closing()


async def test_bytes_on_an_idle_connection_close_it() -> None:
    """An answer nobody asked for must not meet the next request."""
    bench = Bench()
    bench.receive(SIZED)
    assert bench.is_reusable
    bench.receive(SIZED)
    assert bench.transport.was_aborted


async def test_early_answer_prevents_reuse() -> None:
    """An answer that came before the request was sent in full ends the connection."""
    bench = Bench()
    bench.transport.unsent_bytes = 100
    bench.receive(SIZED)
    sink, error = await bench.outcome()
    assert (sink.body, error) == (b"hello world", None)
    assert bench.owner.num_idle == 0
    assert bench.transport.was_aborted


async def test_expired_connection_is_closed_then_cut() -> None:
    """An idle connection is closed politely; one whose peer ignores that is cut at its next deadline."""
    bench = Bench()
    bench.receive(SIZED)
    bench.connection.expire()
    assert bench.transport.was_closed
    assert not bench.transport.was_aborted
    assert bench.connection.deadline_s < math.inf
    bench.connection.expire()
    assert bench.transport.was_aborted


async def test_second_answer_starts_clean() -> None:
    """Nothing of the first answer shows in the second on the same connection."""
    bench = Bench()
    bench.receive(SIZED)
    first = bench.exchange
    bench.send()
    bench.receive(CHUNKED)
    sink, error = await bench.outcome()
    assert error is None
    assert sink.body == b"data: 1\n\ndata: 2\n\n"
    assert bench.exchange.content_length is None
    assert first.content_length == 11


async def test_head_deadline_is_not_moved_by_dripping_bytes() -> None:
    """A head that comes byte by byte does not extend the first-byte timeout."""
    bench = Bench()
    deadline_s = bench.connection.deadline_s
    bench.receive(b"H", b"T", b"T", b"P")
    assert bench.connection.deadline_s == deadline_s
    bench.connection.expire()
    _, error = await bench.outcome()
    assert isinstance(error, UpstreamTimeout)


async def test_paused_body_has_no_deadline() -> None:
    """While the client holds the body back, the silence is not the backend's."""
    bench = Bench(UpstreamSettings(idle_timeout_s=5))
    bench.receive(CHUNKED[:-20])
    assert bench.connection.deadline_s < math.inf
    bench.exchange.pause()
    bench.exchange.pause()
    assert bench.connection.deadline_s == math.inf
    assert not bench.transport.is_reading_now
    bench.exchange.resume()
    assert bench.connection.deadline_s < math.inf
    assert bench.transport.is_reading_now


async def test_body_nobody_takes_stops_the_reading() -> None:
    """Bytes that come before the relay are bounded: then the socket is left unread until somebody relays."""
    bench = Bench(UpstreamSettings(max_early_body_bytes=10))
    bench.receive(CHUNKED.partition(b"9\r\n")[0])
    bench.receive(b"b\r\n12345678901\r\n")
    assert not bench.transport.is_reading_now
    relay = asyncio.create_task(bench.outcome())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bench.transport.is_reading_now
    bench.receive(b"0\r\n\r\n")
    sink, error = await relay
    assert (sink.body, error) == (b"12345678901", None)


async def test_connection_returned_while_paused_reads_again() -> None:
    """A sink that pauses on the last bytes leaves no paused connection in the pool."""
    bench = Bench()
    bench.receive(SIZED[:-1])
    bench.exchange.pause()
    bench.receive(SIZED[-1:])
    assert bench.is_reusable
    assert bench.transport.is_reading_now


async def test_http10_answer_is_not_reused() -> None:
    """HTTP/1.0 without keep-alive closes."""
    bench = Bench()
    bench.receive(SIZED.replace(b"HTTP/1.1", b"HTTP/1.0"))
    sink, _ = await bench.outcome()
    assert sink.body == b"hello world"
    assert bench.owner.num_idle == 0


async def test_abort_in_every_phase_closes_and_silences() -> None:
    """After `abort` the connection is gone and no later byte or end reaches the exchange."""
    for num_bytes in range(len(CHUNKED)):
        bench = Bench()
        bench.receive(CHUNKED[:num_bytes])
        bench.exchange.abort()
        bench.exchange.abort()
        assert bench.transport.was_aborted
        bench.connection.data_received(CHUNKED[num_bytes:])
        bench.end("rst")
        assert not bench.exchange.is_complete
        assert bench.owner.num_lost == 1
        if bench.head.done():
            assert bench.head.exception() is None


async def test_sink_may_abort_from_inside() -> None:
    """A sink that gives up during `on_data` leaves nothing behind."""
    bench = Bench()
    bench.receive(CHUNKED[:120])
    await bench.head

    class GivesUp(Sink):
        def on_data(self, data: bytes, is_last: bool) -> None:
            bench.exchange.fail(UpstreamError("enough"))

    with pytest.raises(UpstreamError, match="enough"):
        await bench.exchange.relay(GivesUp())
    assert bench.transport.was_aborted
