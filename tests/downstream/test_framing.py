"""Where requests and bodies end, however the network cut their bytes. No sockets: bytes in, requests out."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.downstream.body import MAX_OVERHEAD_BYTES, BrokenBody, ChunkedBody, SizedBody
from gateway.downstream.connection import ClientConnection
from gateway.downstream.request import ClientRequest
from gateway.downstream.server import ClientServer
from gateway.downstream.settings import DownstreamSettings
from gateway.errors import GatewayError

CHUNKED_HEAD = b"POST /c HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
SIZED = b"POST /s HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\n\r\n\r\n\r\n!"
EMPTY = b"GET /e?q HTTP/1.1\r\nHost: t\r\n\r\n"
CHUNKED = CHUNKED_HEAD + b"4\r\n\r\n\r\n\r\n3;x=y\r\nabc\r\n0\r\nX: \r\n\r\n"
CLOSING = b"GET /last HTTP/1.0\r\n\r\n"

SEQUENCES = {
    "sized, empty, chunked": SIZED + EMPTY + CHUNKED + SIZED,
    "empty lines between": b"\r\n" + EMPTY + b"\r\n\r\n" + CHUNKED + b"\r\n" + EMPTY,
    "nothing behind the last": SIZED + CLOSING + EMPTY,
    "a bad one behind a good one": SIZED + b"GET / HTTP/2.0\r\nHost: t\r\n\r\n" + EMPTY,
    "a body with bad chunks": EMPTY + CHUNKED_HEAD + b"3\r\nabcd\r\n0\r\n\r\n" + EMPTY,
    "an upgrade that nobody took up": b"POST /u HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\n"
    b"Upgrade: h2c\r\nContent-Length: 2\r\n\r\nab" + EMPTY,
}


class FakeTransport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def can_write_eof(self) -> bool:
        return True

    def get_extra_info(self, _name: str) -> Any:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int, low: int) -> None: ...


async def outcome_of(pieces: list[bytes]) -> tuple[list[tuple[object, ...]], list[int], bool]:
    """The requests that were served, the statuses of the answers, and whether the connection ended."""
    served: list[tuple[object, ...]] = []

    async def serve(request: ClientRequest) -> None:
        try:
            body = await request.read_body()
        except GatewayError as error:
            request.answer(error.status, ())
            return
        served.append((request.method, request.raw_path, tuple(request.raw_headers), body))
        request.answer(200, ())

    tasks: list[asyncio.Task[None]] = []
    server = ClientServer(lambda request: tasks.append(asyncio.ensure_future(serve(request))), _SETTINGS)
    connection: ClientConnection = server()
    transport = FakeTransport()
    connection.connection_made(cast(asyncio.Transport, transport))
    for piece in pieces:
        connection.data_received(piece)
        await _settle()
    await _settle()
    connection.connection_lost(None)
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.close()
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", transport.written)]
    return served, statuses, transport.is_closed


_SETTINGS = DownstreamSettings()


async def _settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", SEQUENCES)
async def test_one_byte_at_a_time_is_the_whole(name: str) -> None:
    """Every cut into two, and single bytes, give what one read gives."""
    data = SEQUENCES[name]
    expected = await outcome_of([data])
    assert expected[0]
    assert await outcome_of([data[at : at + 1] for at in range(len(data))]) == expected
    for cut in range(1, len(data)):
        assert await outcome_of([data[:cut], data[cut:]]) == expected, cut


async def test_what_the_sequences_are_read_as() -> None:
    """In order, each with its own body; nothing is served behind an end."""
    requests, statuses, is_closed = await outcome_of([SEQUENCES["sized, empty, chunked"]])
    assert [(one[1], one[3]) for one in requests] == [
        ("/s", b"\r\n\r\n!"),
        ("/e?q", b""),
        ("/c", b"\r\n\r\nabc"),
        ("/s", b"\r\n\r\n!"),
    ]
    assert (statuses, is_closed) == ([200] * 4, False)
    assert (await outcome_of([SEQUENCES["nothing behind the last"]]))[1:] == ([200, 200], True)
    assert (await outcome_of([SEQUENCES["a bad one behind a good one"]]))[1:] == ([200, 505], True)
    assert (await outcome_of([SEQUENCES["a body with bad chunks"]]))[1:] == ([200, 400], True)


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40) | st.just(b"\r\n\r\n0\r\n\r\n"), max_size=6),
    trailer=st.sampled_from([b"", b"X: y\r\n"]),
    rest=st.binary(max_size=20) | st.just(b"\r\n\r\n"),
    cuts=st.lists(st.integers(0, 300), max_size=5),
)
def test_a_chunked_body_takes_no_byte_behind_its_end(
    chunks: list[bytes], trailer: bytes, rest: bytes, cuts: list[int]
) -> None:
    """However it is cut, and whatever it holds or is followed by."""
    framed = (
        b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n" + trailer + b"\r\n"
    )
    data = framed + rest
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    body = ChunkedBody()
    taken = 0
    for start, end in itertools.pairwise(places):
        if not body.is_complete:
            taken = start + body.feed(data[start:end])
    assert body.is_complete
    assert taken == len(framed)
    assert body.join() == b"".join(chunks)
    assert body.num_bytes == len(b"".join(chunks))


@given(data=st.binary(min_size=10, max_size=60), cuts=st.lists(st.integers(1, 59), max_size=5))
def test_a_sized_body_takes_no_byte_behind_its_end(data: bytes, cuts: list[int]) -> None:
    """However it is cut."""
    body = SizedBody(10)
    taken = 0
    for start, end in itertools.pairwise(sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})):
        if not body.is_complete:
            taken = start + body.feed(data[start:end])
    assert (taken, body.join(), body.num_bytes) == (10, data[:10], 10)


@pytest.mark.parametrize("endless", [b"X-Trailer: " + b"x" * 1_000 + b"\r\n", b"x" * 1_000])
def test_bytes_that_bring_no_body_are_bounded(endless: bytes) -> None:
    """Trailers and chunk extensions without end."""
    body = ChunkedBody()
    body.feed(b"0\r\n" if endless.startswith(b"X-") else b"5;")
    for _ in range(MAX_OVERHEAD_BYTES // len(endless) - 1):
        body.feed(endless)
    with pytest.raises(BrokenBody):
        body.feed(endless * 2)


def test_a_little_body_pays_for_little_overhead() -> None:
    """S05: a byte now and then must not buy an extension of any length."""
    body = ChunkedBody()
    chunk = b"1;" + b"x" * 1_000 + b"\r\nx\r\n"
    for _ in range(MAX_OVERHEAD_BYTES // len(chunk)):
        body.feed(chunk)
    with pytest.raises(BrokenBody):
        body.feed(chunk * 4)


def test_fine_chunks_become_one_piece_per_read() -> None:
    """A million chunks of one byte must not become a million objects."""
    body = ChunkedBody()
    for _ in range(3):
        body.feed(b"1\r\nx\r\n" * 10_000)
    assert len(body._pieces) == 3
    assert body.num_bytes == 30_000
