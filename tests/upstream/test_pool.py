"""UpstreamPool on real sockets: reuse, limits, stale connections, timeouts."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes.backend import STREAM_HEAD, FakeBackend, chunk, hang, raw, reset, respond, stream

from gateway.errors import (
    UpstreamConnectFailed,
    UpstreamError,
    UpstreamPoolFull,
    UpstreamRefused,
    UpstreamReset,
    UpstreamTimeout,
    UpstreamTruncated,
)
from gateway.upstream.pool import UpstreamPool, is_refusal
from gateway.upstream.settings import UpstreamSettings

HEAD = b"POST /v1/x HTTP/1.1\r\nhost: fake\r\ncontent-length: 2\r\n\r\n"
BODY = b"{}"


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    async with FakeBackend() as started:
        yield started


@pytest.fixture
async def pool(backend: FakeBackend) -> AsyncIterator[UpstreamPool]:
    made = UpstreamPool(backend.base_url, UpstreamSettings())
    yield made
    await made.close()


async def call(pool: UpstreamPool, limit_bytes: int = 1 << 20) -> tuple[int, bytes]:
    exchange = await pool.open(HEAD, BODY)
    return exchange.status, await exchange.read(limit_bytes)


async def test_an_answer_is_returned_as_sent(backend: FakeBackend, pool: UpstreamPool) -> None:
    """Status, reason, headers in order and body arrive as the backend sent them."""
    backend.script(respond(b"abc", status=418, reason="Tea Pot", headers=(("X-A", "1"), ("x-b", "2"))))
    exchange = await pool.open(HEAD, BODY)
    assert (exchange.status, exchange.reason) == (418, b"Tea Pot")
    assert exchange.headers == [(b"x-a", b"1"), (b"x-b", b"2"), (b"content-length", b"3")]
    assert exchange.content_length == 3
    assert await exchange.read(10) == b"abc"
    assert backend.requests[0].head == HEAD
    assert backend.requests[0].body == BODY


async def test_a_complete_answer_returns_its_connection(backend: FakeBackend, pool: UpstreamPool) -> None:
    """Ten requests in a row use one connection."""
    for _ in range(10):
        assert (await call(pool))[0] == 200
    assert backend.num_connections == 1
    assert pool.stats().num_reused_total == 9
    assert pool.stats().num_idle == 1


async def test_parallel_requests_use_parallel_connections(backend: FakeBackend, pool: UpstreamPool) -> None:
    """Two requests at once never share a connection; afterwards the last one used is taken first."""
    first, second = await pool.open(HEAD, BODY), await pool.open(HEAD, BODY)
    await asyncio.gather(first.read(1 << 20), second.read(1 << 20))
    await call(pool)
    assert backend.num_connections <= 2
    assert pool.stats().num_active == 0


async def test_connection_close_is_obeyed(backend: FakeBackend, pool: UpstreamPool) -> None:
    """An answer with `connection: close` is the last of its connection."""
    backend.script(respond(keep_alive=False), respond(keep_alive=False))
    await call(pool)
    await call(pool)
    assert backend.num_connections == 2
    assert pool.stats().num_idle == 0


async def test_close_delimited_body_ends_with_the_connection(
    backend: FakeBackend, pool: UpstreamPool
) -> None:
    """Without a length the body lasts to the end of the connection."""
    backend.script(raw(b"HTTP/1.1 200 OK\r\n\r\nall of it", then="close"))
    assert await call(pool) == (200, b"all of it")


async def test_interim_answers_are_skipped(backend: FakeBackend, pool: UpstreamPool) -> None:
    """1xx answers before the real one leave no header behind."""
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
    backend.script(raw(interim + b"HTTP/1.1 200 Fine\r\ncontent-length: 2\r\n\r\nok"))
    exchange = await pool.open(HEAD, BODY)
    assert (exchange.status, exchange.reason) == (200, b"Fine")
    assert exchange.headers == [(b"content-length", b"2")]
    assert await exchange.read(10) == b"ok"
    await call(pool)
    assert backend.num_connections == 1


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_body_end_with_the_head(
    backend: FakeBackend, pool: UpstreamPool, status: int
) -> None:
    """204 and 304 have no body, whatever length they name."""
    backend.script(raw(b"HTTP/1.1 %d X\r\ncontent-length: 5\r\n\r\n" % status))
    assert await call(pool) == (status, b"")


async def test_head_request_has_no_body(backend: FakeBackend, pool: UpstreamPool) -> None:
    """The answer to HEAD ends with its head although it names a length."""
    backend.script(respond(b"12345"))
    exchange = await pool.open(b"HEAD /x HTTP/1.1\r\nhost: fake\r\n\r\n", b"", method="HEAD")
    assert exchange.content_length == 5
    assert await exchange.read(10) == b""


async def test_stale_connection_is_replaced_silently(backend: FakeBackend, pool: UpstreamPool) -> None:
    """A reused connection that is reset without a byte costs the client nothing: one fresh try."""
    await call(pool)
    backend.script(reset())
    assert (await call(pool))[0] == 200
    assert backend.num_connections == 2
    assert pool.stats().num_stale_total == 1


async def test_fresh_connection_reset_is_reported(backend: FakeBackend, pool: UpstreamPool) -> None:
    """A reset of a new connection is the backend's failure: no second try here."""
    backend.script(reset())
    with pytest.raises(UpstreamReset):
        await pool.open(HEAD, BODY)
    assert len(backend.requests) == 1


async def test_unreplayable_request_is_not_resent(backend: FakeBackend, pool: UpstreamPool) -> None:
    """`replayable=False` reports the reset of a reused connection instead of sending again."""
    await call(pool)
    backend.script(reset())
    with pytest.raises(UpstreamReset):
        await pool.open(HEAD, BODY, replayable=False)
    assert len(backend.requests) == 2


async def test_reset_after_first_byte_is_not_resent(backend: FakeBackend, pool: UpstreamPool) -> None:
    """Once a response byte came, the request has been processed: not sent again."""
    await call(pool)
    backend.script(raw(b"HTTP/1.1 2", then="reset"))
    with pytest.raises(UpstreamReset):
        await pool.open(HEAD, BODY)
    assert len(backend.requests) == 2


async def test_refused_connect(backend: FakeBackend) -> None:
    """Nobody listening is UpstreamRefused."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        pool = UpstreamPool(f"http://127.0.0.1:{unused.getsockname()[1]}", UpstreamSettings())
        with pytest.raises(UpstreamRefused, match="refused"):
            await pool.open(HEAD, BODY)
    assert pool.stats().num_connect_failed_total == 1
    await pool.close()


async def test_refused_at_each_address_of_a_name() -> None:
    """`localhost` may be two addresses: asyncio then hides what happened in a text."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        pool = UpstreamPool(f"http://localhost:{unused.getsockname()[1]}", UpstreamSettings())
        with pytest.raises(UpstreamRefused):
            await pool.open(HEAD, BODY)
    await pool.close()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), True),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), True),
        (OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 111] the same"), True),
        (OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 113] No route"), False),
        (OSError(errno.EHOSTUNREACH, "No route to host"), False),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), False),
        (OSError("something else"), False),
    ],
)
def test_what_counts_as_refused(error: OSError, expected: bool) -> None:
    """Only that nobody listens: a host that cannot be reached may be there."""
    assert is_refusal(error) is expected


async def test_a_socket_file_that_is_not_there(tmp_path: Path) -> None:
    """An engine behind a Unix socket that does not run."""
    pool = UpstreamPool(f"unix:{tmp_path}/engine.sock", UpstreamSettings())
    with pytest.raises(UpstreamRefused):
        await pool.open(HEAD, BODY)
    await pool.close()


async def test_silence_is_told_from_answers_under_way(backend: FakeBackend, pool: UpstreamPool) -> None:
    """The last read of a body counts; a request without an answer does not, nor an idle connection."""
    assert pool.silent_for_s() == math.inf
    await call(pool)
    assert pool.silent_for_s() == math.inf
    gate = asyncio.Event()
    backend.script(stream(b"1", b"2", gates={1: gate}))
    exchange = await pool.open(HEAD, BODY)
    await asyncio.sleep(0.05)
    assert 0.04 < pool.silent_for_s() < 1.0
    gate.set()
    await exchange.read(100)
    assert pool.silent_for_s() == math.inf
    backend.script(hang())
    waiting = asyncio.create_task(pool.open(HEAD, BODY))
    await backend.wait_until(lambda b: len(b.requests) == 3)
    assert pool.silent_for_s() == math.inf
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_black_hole_ends_with_the_connect_timeout() -> None:
    """A listener that never accepts (full backlog) costs the connect timeout, not more."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        pool = UpstreamPool(
            f"http://127.0.0.1:{listener.getsockname()[1]}", UpstreamSettings(connect_timeout_s=0.1)
        )
        with pytest.raises(UpstreamConnectFailed, match=r"within 0\.1 s"):
            await pool.open(HEAD, BODY)
        for filler in fillers:
            filler.close()
    assert pool.stats().num_connecting == 0
    await pool.close()


async def test_pause_of_our_own_loop_is_not_a_connect_timeout(backend: FakeBackend) -> None:
    """An event loop that stands still for longer than the connect timeout does not blame the backend."""
    pool = UpstreamPool(backend.base_url, UpstreamSettings(connect_timeout_s=0.1))
    opening = asyncio.create_task(pool.open(HEAD, BODY))
    await asyncio.sleep(0)
    paused_until_s = time.monotonic() + 0.3
    while time.monotonic() < paused_until_s:
        pass
    exchange = await opening
    assert exchange.status == 200
    exchange.abort()
    await pool.close()


async def test_first_byte_timeout(backend: FakeBackend) -> None:
    """No head in time: UpstreamTimeout, and the backend sees the connection close."""
    pool = UpstreamPool(backend.base_url, UpstreamSettings(first_byte_timeout_s=0.05))
    backend.script(hang())
    with pytest.raises(UpstreamTimeout):
        await pool.open(HEAD, BODY)
    await backend.wait_until(lambda b: b.num_cancelled == 1)
    await pool.close()


async def test_idle_timeout_in_the_body(backend: FakeBackend) -> None:
    """Silence inside a body: what came is delivered, then UpstreamTimeout."""
    pool = UpstreamPool(backend.base_url, UpstreamSettings(idle_timeout_s=0.05))
    backend.script(stream(b"data: 1\n\n", then="wait"))
    exchange = await pool.open(HEAD, BODY)
    with pytest.raises(UpstreamTimeout):
        await exchange.read(100)
    await backend.wait_until(lambda b: b.num_cancelled == 1)
    await pool.close()


async def test_idle_connections_expire(backend: FakeBackend) -> None:
    """An unused connection is closed by us after `idle_expiry_s`."""
    pool = UpstreamPool(backend.base_url, UpstreamSettings(idle_expiry_s=0.05))
    await call(pool)
    await backend.wait_until(lambda b: b.num_open == 0)
    assert pool.stats().num_idle == 0
    await pool.close()


async def test_pool_is_bounded(backend: FakeBackend) -> None:
    """One connection more than `max_connections` is refused at once; a freed place serves again."""
    pool = UpstreamPool(backend.base_url, UpstreamSettings(max_connections=1))
    backend.script(hang())
    waiting = asyncio.create_task(pool.open(HEAD, BODY))
    await backend.wait_until(lambda b: len(b.requests) == 1)
    with pytest.raises(UpstreamPoolFull, match="in use"):
        await pool.open(HEAD, BODY)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await backend.wait_until(lambda b: b.num_cancelled == 1)
    assert (await call(pool))[0] == 200
    await pool.close()


async def test_idle_list_is_bounded(backend: FakeBackend) -> None:
    """`max_idle_connections=0` keeps none."""
    pool = UpstreamPool(backend.base_url, UpstreamSettings(max_idle_connections=0))
    await call(pool)
    await backend.wait_until(lambda b: b.num_open == 0)
    await pool.close()


async def test_truncated_body(backend: FakeBackend, pool: UpstreamPool) -> None:
    """A FIN before the promised length is UpstreamTruncated."""
    backend.script(raw(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n12345", then="close"))
    exchange = await pool.open(HEAD, BODY)
    with pytest.raises(UpstreamTruncated):
        await exchange.read(100)


async def test_answer_over_the_limit_is_refused(backend: FakeBackend, pool: UpstreamPool) -> None:
    """`read` never holds more than its limit, and gives up on an endless body."""
    backend.script(raw(STREAM_HEAD + chunk(b"x" * 200), then="wait"))
    exchange = await pool.open(HEAD, BODY)
    with pytest.raises(UpstreamError, match="longer than 100 bytes"):
        await exchange.read(100)
    await backend.wait_until(lambda b: b.num_cancelled == 1)


async def test_cancel_while_waiting_for_the_head(backend: FakeBackend, pool: UpstreamPool) -> None:
    """A cancelled request closes its connection at once."""
    backend.script(hang())
    task = asyncio.create_task(pool.open(HEAD, BODY))
    await backend.wait_until(lambda b: len(b.requests) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await backend.wait_until(lambda b: b.num_cancelled == 1)
    assert pool.stats().num_active == 0


async def test_abort_is_idempotent_and_spares_the_next_user(backend: FakeBackend, pool: UpstreamPool) -> None:
    """Aborting a finished exchange does not touch the connection that another request uses by now."""
    first = await pool.open(HEAD, BODY)
    await first.read(1 << 20)
    second = await pool.open(HEAD, BODY)
    first.abort()
    first.abort()
    assert await second.read(1 << 20)
    assert backend.num_connections == 1


async def test_complete_answer_is_relayed_without_suspending(
    backend: FakeBackend, pool: UpstreamPool
) -> None:
    """When head and body came in one read, `relay` returns without yielding to the loop."""
    backend.script(respond(b"all here"))
    exchange = await pool.open(HEAD, BODY)
    assert exchange.is_complete
    coroutine = exchange.read(100)
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    assert stop.value.value == b"all here"


async def test_close_waits_for_every_connection(backend: FakeBackend) -> None:
    """After `close` no connection is left, busy ones included; later requests are refused."""
    pool = UpstreamPool(backend.base_url, UpstreamSettings())
    backend.script(stream(b"data: 1\n\n", then="wait"))
    exchange = await pool.open(HEAD, BODY)
    await call(pool)
    await pool.close()
    assert pool.stats().num_idle == pool.stats().num_active == 0
    with pytest.raises(UpstreamTruncated):
        await exchange.read(100)
    with pytest.raises(UpstreamConnectFailed, match="removed"):
        await pool.open(HEAD, BODY)


async def test_unix_socket(tmp_path: object) -> None:
    """`unix:/path` reaches an engine on a Unix socket."""
    async with FakeBackend(unix_path=f"{tmp_path}/engine.sock") as backend:
        pool = UpstreamPool(backend.base_url, UpstreamSettings())
        assert (await call(pool))[0] == 200
        await pool.close()
