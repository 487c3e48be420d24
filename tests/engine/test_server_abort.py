"""Clients that disconnect, engines that fail: nothing is left behind, nothing waits for ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import ClientPayloadError, ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from engine.worker_app import LIMIT_S, MODEL, Worker, running_worker
from fakes.tiny_checkpoint import write_tiny_checkpoint

from engine_adapter.engine.core.async_engine import AsyncEngine, EngineDead
from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.core.stats import EngineStats
from engine_adapter.server.event_stream import send_stream


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def worker(checkpoint: Path) -> AsyncIterator[Worker]:
    async with running_worker(checkpoint) as running:
        yield running


async def stats_until(engine: AsyncEngine, holds: Callable[[EngineStats], bool]) -> EngineStats:
    """Read the engine's state between steps until the condition holds; bounded by a time limit."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            stats = await engine.call(LLMEngine.stats)
            if holds(stats):
                return stats


def is_idle(stats: EngineStats) -> bool:
    return stats.num_running == 0 and stats.num_waiting == 0


async def open_request(worker: Worker, body: dict[str, object]) -> asyncio.StreamWriter:
    """Post by hand, so that the connection can be dropped at a chosen moment."""
    server = worker.client.server
    _, writer = await asyncio.open_connection(server.host, server.port)
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    await writer.drain()
    return writer


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_gone_client_frees_its_blocks(worker: Worker, is_stream: bool, num_choices: int) -> None:
    """Streamed or not, once the connection drops the engine stops computing and holds no live block."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1900}
    body |= {"stream": is_stream, "n": num_choices, "ignore_eos": True}
    writer = await open_request(worker, body)
    await stats_until(worker.context.engine, lambda stats: stats.num_running == num_choices)
    loop = asyncio.get_running_loop()
    dropped_s = loop.time()
    writer.close()
    stats = await stats_until(worker.context.engine, is_idle)
    assert stats.num_blocks_used == 0
    assert loop.time() - dropped_s < 5  # far below the 1,900 tokens it would take
    page = await (await worker.client.get("/metrics")).text()
    assert 'vllm:request_success_total{finished_reason="abort",model_name="tiny"} 1.0' in page


async def test_a_failed_write_closes_the_events_before_the_handler_ends() -> None:
    """When a write notices the lost client, the generator is closed at once, not by the garbage collector."""
    trace: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        async def events() -> AsyncGenerator[bytes, None]:
            try:
                yield b"data: 1\n\n"
                assert request.transport is not None
                request.transport.abort()
                while True:
                    yield b"data: 2\n\n"
            finally:
                trace.append("closed")

        try:
            return await send_stream(request, events())
        finally:
            trace.append("handled")

    app = web.Application()
    app.router.add_get("/", handler)
    async with TestClient(TestServer(app)) as client:
        response = await client.get("/")
        await read_cut_stream(response)
    assert trace == ["closed", "handled"]


async def test_a_client_gone_from_the_queue_is_forgotten(checkpoint: Path) -> None:
    """A waiting request whose client left never runs."""
    async with running_worker(checkpoint, max_num_sequences=1) as worker:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1900}
        first = await open_request(worker, {**body, "ignore_eos": True})
        await stats_until(worker.context.engine, lambda stats: stats.num_running == 1)
        second = await open_request(worker, body)
        await stats_until(worker.context.engine, lambda stats: stats.num_waiting == 1)
        second.close()
        stats = await stats_until(worker.context.engine, lambda stats: stats.num_waiting == 0)
        assert stats.num_running == 1
        first.close()
        await stats_until(worker.context.engine, is_idle)


async def test_in_flight_returns_to_zero(worker: Worker) -> None:
    """Answers, errors and dropped clients all leave the count; drain may rely on it."""
    await worker.chat()
    await worker.client.get("/nope")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1900}
    writer = await open_request(worker, {**body, "ignore_eos": True})
    await stats_until(worker.context.engine, lambda stats: stats.num_running == 1)
    writer.close()
    async with asyncio.timeout(LIMIT_S):
        await worker.state.wait_idle()
    assert worker.state.num_in_flight == 0


async def test_concurrent_requests_do_not_mix(worker: Worker) -> None:
    """Twenty different chats at once get the answers that each gets alone."""
    prompts = [f"question {number}" for number in range(20)]
    together = await asyncio.gather(*(worker.chat(prompt, max_tokens=12) for prompt in prompts))
    for prompt, response in zip(prompts, together, strict=True):
        alone = await worker.chat(prompt, max_tokens=12, cache_salt="alone")
        assert (await response.json())["choices"] == (await alone.json())["choices"]


def break_engine(engine: LLMEngine) -> None:
    """Make the next step raise outside the boundary that ends single requests."""

    def fail(_: float) -> None:
        raise RuntimeError("broken on purpose")

    engine.scheduler.schedule = fail  # type: ignore[method-assign, assignment]  # the fault


async def read_cut_stream(response: ClientResponse) -> tuple[bytes, bool]:
    """What came, and whether the stream ended without its terminator."""
    received = b""
    try:
        async for data in response.content.iter_any():
            received += data
    except ClientPayloadError:
        return received, True
    return received, False


async def test_a_dying_engine_tells_everybody(checkpoint: Path) -> None:
    """Streams end in-band and uncleanly, whole requests get a 503, later calls fail at once."""
    async with running_worker(checkpoint) as worker:
        stream = await worker.chat(stream=True, max_tokens=1900)
        assert stream.status == 200
        whole = asyncio.ensure_future(worker.chat(max_tokens=1900))
        await stats_until(worker.context.engine, lambda stats: stats.num_running == 2)
        await worker.context.engine.call(break_engine)
        response = await whole
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "engine_dead"
        received, was_cut = await read_cut_stream(stream)
        assert was_cut
        assert b'"code":"engine_dead"' in received
        assert b"[DONE]" not in received
        assert worker.context.engine.when_dead.is_set()
        with pytest.raises(EngineDead):
            await worker.context.engine.call(LLMEngine.stats)
        assert (await worker.chat()).status == 503


async def test_a_failed_step_ends_only_its_own_requests(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that raises is a 500 for those in it; the next request is served."""
    engine = await worker.context.engine.call(lambda engine: engine)
    run = engine._runner.run

    def fail_once(*arguments: object) -> object:
        monkeypatch.setattr(engine._runner, "run", run)
        raise RuntimeError("secret detail")

    monkeypatch.setattr(engine._runner, "run", fail_once)
    response = await worker.chat()
    assert response.status == 500
    assert "secret" not in await response.text()
    assert (await worker.chat()).status == 200
