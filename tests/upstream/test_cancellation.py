"""A request cancelled after any number of turns of the event loop leaves no connection in use, no task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fakes.backend import Behaviour, FakeBackend, hang, respond, stream

from gateway.upstream.exchange import BodySource
from gateway.upstream.pool import UpstreamPool
from gateway.upstream.settings import UpstreamSettings

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"
NUM_TURNS = 40  # more than a whole exchange takes


class Discard:
    def attach(self, source: BodySource) -> None: ...

    def on_data(self, data: bytes, is_last: bool) -> None: ...


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    async with FakeBackend() as started:
        yield started


async def exchange_once(pool: UpstreamPool) -> None:
    exchange = await pool.open(HEAD, b"{}")
    await exchange.relay(Discard())


async def settle(pool: UpstreamPool) -> None:
    async with asyncio.timeout(5):
        while pool.stats().num_active or pool.stats().num_connecting:
            await asyncio.sleep(0)


@pytest.mark.parametrize("is_reused", [False, True], ids=["fresh", "reused"])
@pytest.mark.parametrize(
    "behaviour",
    [respond(b"{}"), hang(), stream(b"data: 1\n\n", then="wait"), stream(b"data: 1\n\n", then="reset")],
    ids=["answers", "hangs", "streams", "breaks"],
)
async def test_cancel_after_any_number_of_turns(
    backend: FakeBackend, behaviour: Behaviour, is_reused: bool
) -> None:
    """Connecting, waiting for the head, relaying: a cancel in each leaves the pool as it was."""
    pool = UpstreamPool(backend.base_url, UpstreamSettings())
    tasks_before = asyncio.all_tasks()
    for num_turns in range(NUM_TURNS):
        backend.default = respond(b"{}")
        if is_reused:
            await exchange_once(pool)
        backend.default = behaviour
        task = asyncio.create_task(exchange_once(pool))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await settle(pool)
    await pool.close()
    assert pool.stats().num_active == pool.stats().num_idle == 0
    await backend.wait_until(lambda b: b.num_open == 0)
    left = [task for task in asyncio.all_tasks() - tasks_before if "Fake" not in repr(task.get_coro())]
    assert left == []
