"""The chart's memory limit is enough for a bad minute: many streams, and very long bodies among them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path

import aiohttp
import fakes.backend as fake
import psutil
import yaml
from fakes.gateway_world import ProbedBackend
from fakes.helm_chart import CHART
from fakes.redis_server import free_port

from gateway.commands.up import Child

ROOT = Path(__file__).parents[2]
NUM_STREAMS = 200
NUM_LONG_BODIES = 5
LONG_BODY_BYTES = 20_000_000
EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'


def chart_limit_bytes() -> int:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    size = re.fullmatch(r"(\d+)(Mi|Gi)", values["gateway"]["resources"]["limits"]["memory"])
    assert size is not None
    return int(size[1]) * {"Mi": 1 << 20, "Gi": 1 << 30}[size[2]]


def peak_bytes(pid: int) -> int:
    """The most memory that a process and its children have held, each at its own peak."""
    root = psutil.Process(pid)
    peak_kib = 0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak_kib += int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])  # type: ignore[index]  # None fails
    return peak_kib * 1024


async def post(client: aiohttp.ClientSession, url: str, body: bytes) -> bytes:
    headers = {"content-type": "application/json"}
    async with client.post(url, data=io.BytesIO(body), headers=headers) as answer:
        text = await answer.read()
        assert answer.status == 200, text[:300]
        return text


def chat(text: str) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "fake-model", "stream": True, "messages": messages}).encode()


async def test_streams_and_long_bodies_fit_the_charts_limit(tmp_path: Path) -> None:
    """B79: 200 streams under way while five bodies of 20 MB arrive at once; all are answered in full, and
    the process and its helpers stay below the limit even at their peaks together."""
    gate = asyncio.Event()
    async with ProbedBackend() as backend:
        backend.default = fake.stream(EVENT, b"data: [DONE]\n\n", gates={1: gate})
        port = free_port()
        config = {
            "listen": {"port": port},
            "admin": {"is_enabled": False},
            "backends": [{"url": backend.base_url, "engine": "vllm"}],
        }
        (tmp_path / "homing.yaml").write_text(yaml.safe_dump(config))
        gateway = Child(
            name="gateway",
            command=[sys.executable, "-m", "gateway.main", "gateway", "--config", f"{tmp_path}/homing.yaml"],
            ready_url=f"http://127.0.0.1:{port}/readyz?min_backends=1",
            log_path=tmp_path / "log",
            environment={"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "cuda")))},
        )
        try:
            await gateway.start()
            await gateway.wait_ready(60)
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as client:
                bodies = [chat(f"stream {number}") for number in range(NUM_STREAMS)]
                bodies += [chat("x" * LONG_BODY_BYTES + str(number)) for number in range(NUM_LONG_BODIES)]
                running = [asyncio.ensure_future(post(client, url, body)) for body in bodies]
                await backend.wait_until(lambda one: len(one.requests) == len(bodies), timeout_s=90)
                gate.set()
                answers = await asyncio.gather(*running)
            assert all(answer.endswith(b"data: [DONE]\n\n") for answer in answers)
            assert gateway.process is not None
            assert 0 < peak_bytes(gateway.process.pid) < chart_limit_bytes()
        finally:
            await gateway.stop()
