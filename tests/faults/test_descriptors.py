"""When file descriptors run out: clients are told, running streams live, and all is well afterwards.

The gateway runs in a process of its own, because the limit is one of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes.backend import FakeBackend, respond, stream
from fakes.gateway_world import ProbedBackend
from fakes.raw_client import RawClient, post

NUM_DESCRIPTORS = 160  # leaves room for 48 clients
BODY = b'{"model":"fake-model","stream":true,"messages":[{"role":"user","content":"hi"}]}'


@pytest.fixture
async def backend() -> AsyncIterator[FakeBackend]:
    async with ProbedBackend() as started:
        yield started


@pytest.fixture
async def port(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[int]:
    """A gateway process with few descriptors; the port it listens on."""
    config = {
        "listen": {"port": 0},
        "admin": {"is_enabled": False},
        "log": {"access": False},
        "health": {"probe_interval_s": 0.2, "healthy_after": 1},
        "backends": [{"id": "b0", "url": backend.base_url, "engine": "vllm"}],
    }
    path = tmp_path / "homing.yaml"
    path.write_text(json.dumps(config))
    limits = (NUM_DESCRIPTORS, NUM_DESCRIPTORS)
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("homing"),
        "gateway",
        "--config",
        path,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
    )
    assert process.stderr is not None
    try:
        while True:
            line = await asyncio.wait_for(process.stderr.readline(), 60)
            assert line, "the gateway did not start"
            with contextlib.suppress(ValueError):
                if json.loads(line).get("event") == "gateway_started":
                    yield json.loads(line)["port"]
                    break
    finally:
        process.kill()
        await process.communicate()


async def _ask_until(port: int, status: int) -> None:
    """Ask until the answer has this status (the gateway's probes and closes need a moment)."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                async with RawClient(port) as client:
                    await client.send(post("/v1/chat/completions", BODY))
                    if (await client.read_response()).status == status:
                        return
            await asyncio.sleep(0.05)


async def test_no_room_is_told_and_streams_live(backend: FakeBackend, port: int) -> None:
    """With every place taken a new client gets 503 in JSON at once; a running stream goes on to its end;
    when places are free again, requests are served."""
    backend.default = respond(b"{}")
    await _ask_until(port, 200)
    gate = asyncio.Event()
    backend.script(stream(b"data: 1\n\n", b"data: 2\n\n", gates={1: gate}))
    async with RawClient(port) as running:
        await running.send(post("/v1/chat/completions", BODY))
        await running.read_head()
        assert await running.read_chunk() == b"data: 1\n\n"
        async with contextlib.AsyncExitStack() as crowd:
            for _ in range(60):  # more than there is room for: those beyond it are turned away at once
                await crowd.enter_async_context(RawClient(port))
            await _ask_until(port, 503)
            async with RawClient(port) as refused:
                response = await refused.read_response()
                assert response.status == 503
                assert json.loads(response.body)["error"]["code"] == "overloaded"
                assert response.header("retry-after") == "1"
            gate.set()
            assert await running.read_chunk() == b"data: 2\n\n"
            assert await running.read_chunk() == b""
        await _ask_until(port, 200)


async def test_storm_of_connections_is_survived(backend: FakeBackend, port: int) -> None:
    """600 connects and requests at once, far more than there is room for: each is served, refused or
    closed; the process lives and serves again."""
    backend.default = respond(b"{}")
    await _ask_until(port, 200)

    async def one() -> int:
        try:
            async with RawClient(port) as client:
                await client.send(post("/v1/chat/completions", BODY))
                return (await client.read_response()).status
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0

    statuses = await asyncio.gather(*(one() for _ in range(600)))
    assert set(statuses) <= {0, 200, 503}
    assert 200 in statuses
    await _ask_until(port, 200)
