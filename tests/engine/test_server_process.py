"""The worker as a process: start, refusals at start, signals, orphans."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientPayloadError, ClientResponse, ClientSession
from engine.worker_app import LIMIT_S
from fakes.tiny_checkpoint import write_tiny_checkpoint

from engine_adapter.engine.core.config import EngineConfig
from engine_adapter.server.__main__ import main
from engine_adapter.server.memory_check import TooLittleMemory, check_memory
from engine_adapter.server.startup import ServerConfig, WorkerServer, bind

ROOT = Path(__file__).parents[2]
SETTINGS = ("--dtype", "fp32", "--kv-memory", "8MiB", "--served-model-name", "tiny")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@contextlib.asynccontextmanager
async def serving_worker(
    checkpoint: Path, *, drain_timeout_s: float = 600
) -> AsyncIterator[tuple[asyncio.Future[int], ClientSession]]:
    """Run the whole life of a worker in this process, up to ready; yield its end and a client."""
    config = ServerConfig(
        model=str(checkpoint),
        model_names=("tiny",),
        drain_timeout_s=drain_timeout_s,
        engine=EngineConfig(dtype="fp32", num_kv_blocks=512),
    )
    listener = bind("127.0.0.1", 0)
    server = WorkerServer(config, listener)
    ended = asyncio.ensure_future(server.run())
    async with ClientSession(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
        await until_status(client, "/ready", 200)
        yield ended, client


async def until_status(client: ClientSession, path: str, status: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            async with client.get(path) as response:
                if response.status == status:
                    return


async def open_stream(client: ClientSession, **fields: object) -> ClientResponse:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    return await client.post("/v1/chat/completions", json={**body, "stream": True, **fields})


async def test_sigterm_finishes_running_answers_and_ends_with_zero(checkpoint: Path) -> None:
    """The running stream gets its [DONE], a new request a 503; then the worker exits."""
    async with serving_worker(checkpoint) as (ended, client):
        stream = await open_stream(client, max_tokens=2000)  # outlives the refusal
        os.kill(os.getpid(), signal.SIGTERM)
        await until_status(client, "/ready", 503)
        refused = await open_stream(client, max_tokens=1)
        assert refused.status == 503
        assert "Retry-After" in refused.headers
        assert not ended.done()
        assert b"[DONE]" in await stream.read()
        assert await asyncio.wait_for(ended, LIMIT_S) == 0


async def test_a_second_signal_ends_at_once(checkpoint: Path) -> None:
    """Ctrl-C twice does not wait for the drain limit; the cut stream has no [DONE]."""
    async with serving_worker(checkpoint) as (ended, client):
        stream = await open_stream(client, max_tokens=8000)
        os.kill(os.getpid(), signal.SIGINT)
        await until_status(client, "/ready", 503)
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(ended, LIMIT_S) == 0
        with pytest.raises(ClientPayloadError):
            await stream.read()


async def test_the_drain_limit_cuts_what_still_runs(checkpoint: Path) -> None:
    """A stream longer than the limit does not keep the worker alive."""
    async with serving_worker(checkpoint, drain_timeout_s=0) as (ended, client):
        await open_stream(client, max_tokens=8000)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(ended, LIMIT_S) == 0


def test_a_worker_dies_with_its_parent(checkpoint: Path) -> None:
    """A supervisor that is killed leaves no orphan on the port."""
    command = [sys.executable, "-m", "engine_adapter.server", "--port", "0", "--model", str(checkpoint)]
    command += [*SETTINGS, "--die-with-parent"]
    script = f"import subprocess; subprocess.Popen({command!r}); input()"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'cuda'}"}
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert parent.stdout is not None
    line = parent.stdout.readline()
    assert re.match(
        r"worker ready: tiny on http://127\.0\.0\.1:\d+ \(float32, KV memory for \d+ tokens", line
    )
    parent.kill()
    rest = parent.communicate(timeout=LIMIT_S)[0]  # ends only when the worker has closed the pipe too
    assert rest == ""


def test_a_port_in_use_is_one_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 before any model is loaded, with what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port), "--model", str(checkpoint)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: cannot listen on 127.0.0.1:{port} (Address already in use): choose another --port"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/model"], "not found"),
        (["--kv-memory", "900TiB"], "too little memory"),
        (["--kv-memory", "1k"], "block"),
        (["--kv-memory", "much"], "--kv-memory"),
        (["--max-model-len", "0", "--num-kv-blocks", "0"], "block"),
        (["--kv-host-bytes", "much"], "--kv-host-bytes"),
        (["--kv-host-bytes", "900TiB"], "too little memory"),
        (["--kv-disk-path", "/proc/none"], "--kv-disk-path /proc/none cannot be written"),
        (["--kv-disk-path", "/tmp", "--no-prefix-caching"], "prefix caching"),
        (["--attention", "cupy"], "needs a CUDA device"),
        (["--port", "99999999"], "cannot listen"),
        (["--host", "not an address"], "cannot listen"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    checkpoint: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every expected failure: exit code 2, one line, no traceback."""
    assert main(["--port", "0", "--model", str(checkpoint), *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]


def test_memory_that_cannot_be_read_refuses_nothing() -> None:
    """Only a known shortage is an error."""
    check_memory(weight_bytes=2**60, kv_bytes=0, available=None)
    check_memory(weight_bytes=0, kv_bytes=0, available=2**30)
    with pytest.raises(TooLittleMemory, match=r"--kv-memory"):
        check_memory(weight_bytes=2**20, kv_bytes=2**30, available=2**30)
