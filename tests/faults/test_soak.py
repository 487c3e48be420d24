"""`make soak`: 1,500 concurrent streams on one gateway process for five minutes, with large bodies between.

A C engine behind it and a C client before it, so that the gateway is the only Python in the way. Prints
what it saw; asserts only what no busy machine may change: no error, flat memory, gauges at zero.
HOMING_SOAK_S shortens it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

TOOLS = Path(__file__).resolve().parents[1] / "bench" / "gateway"
DURATION_S = float(os.environ.get("HOMING_SOAK_S", "300"))
NUM_STREAMS = 1_500
EVENT_DELAY_US = 100_000  # 10 tokens per second and stream
LARGE_BODY_BYTES = 20_000_000
PORTS = (28_201, 28_202, 28_203, 28_204)


def compile_tool(name: str, folder: Path) -> Path:
    program = folder / name
    subprocess.run(["cc", "-O2", "-o", program, TOOLS / f"{name}.c"], check=True)
    return program


@asynccontextmanager
async def process(*command: object, **options: object) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(*map(str, command), **options)  # type: ignore[arg-type]
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.communicate()


async def started_port(gateway: asyncio.subprocess.Process) -> int:
    assert gateway.stderr is not None
    async with asyncio.timeout(60):
        while line := await gateway.stderr.readline():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == "gateway_started":
                    return int(event["port"])
    raise AssertionError("the gateway did not start")


def write_bodies(path: Path) -> None:
    messages = [{"role": "system", "content": "You are terse. " * 20}]
    lines = []
    for session in range(64):
        turn = {"role": "user", "content": f"question of session {session}"}
        lines.append(json.dumps({"model": "mock-model", "stream": True, "messages": [*messages, turn]}))
    path.write_text("\n".join(line.replace(": true", ":true") for line in lines) + "\n")


async def metric(client: httpx.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics")).text
    return max(
        (float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} ")), default=0.0
    )


async def watch(client: httpx.AsyncClient, pid: int, seen: dict[str, list[float]]) -> None:
    """Once a second: memory, lag of the event loop, time of a liveness probe."""
    while True:
        started_s = time.monotonic()
        (await client.get("/livez")).raise_for_status()
        seen["livez_s"].append(time.monotonic() - started_s)
        seen["lag_s"].append(await metric(client, "homing_event_loop_lag_seconds"))
        seen["rss_mb"].append(psutil.Process(pid).memory_info().rss / 1e6)
        await asyncio.sleep(1)


async def send_large_bodies(client: httpx.AsyncClient) -> int:
    """A 20 MB body now and then, until cancelled; returns only by its count in the caller's list."""
    body = json.dumps(
        {"model": "mock-model", "messages": [{"role": "user", "content": "x" * LARGE_BODY_BYTES}]}
    )
    count = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            (await client.post("/v1/chat/completions", content=body)).raise_for_status()
            count += 1
            await asyncio.sleep(2)
    return count


def report(seen: dict[str, list[float]], load: dict[str, float], num_large: int) -> str:
    lag_ms = [value * 1e3 for value in sorted(seen["lag_s"])]
    rss_mb = seen["rss_mb"]
    first_ms, late_ms = load["first_byte_p50_us"] / 1e3, load["first_byte_p99_us"] / 1e3
    lines = [
        f"streams {load['num_done']:.0f}, events {load['num_events']:.0f}, 20 MB bodies {num_large}",
        f"errors {load['num_errors']}, not 200: {load['num_bad']} (last: {load['last_bad_status']})",
        f"first event p50 {first_ms:.1f} ms, p99 {late_ms:.1f} ms",
        f"loop lag, worst of each second: median {statistics.median(lag_ms):.1f} ms, max {lag_ms[-1]:.1f} ms",
        f"livez max {max(seen['livez_s']) * 1e3:.1f} ms",
        f"RSS by tenths, MB: {' '.join(f'{value:.0f}' for value in rss_mb[:: max(1, len(rss_mb) // 10)])}",
    ]
    return "\n".join(lines)


@pytest.mark.soak
@pytest.mark.timeout(DURATION_S + 240)
async def test_fifteen_hundred_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No failed stream, no failed large body, memory flat after the first third, every gauge back at zero."""
    engine, generator = compile_tool("mock_engine", tmp_path), compile_tool("load_generator", tmp_path)
    bodies = tmp_path / "bodies.jsonl"
    write_bodies(bodies)
    config = {
        "listen": {"port": 0},
        "admin": {"is_enabled": False},
        "log": {"access": False},
        "backends": [{"url": f"http://127.0.0.1:{port}", "engine": "vllm"} for port in PORTS],
    }
    (tmp_path / "homing.yaml").write_text(json.dumps(config))
    homing = Path(sys.executable).with_name("homing")
    async with (
        process(engine, *PORTS),
        process(
            homing, "gateway", "--config", tmp_path / "homing.yaml", stderr=asyncio.subprocess.PIPE
        ) as gateway,
    ):
        port = await started_port(gateway)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            await _wait_ready(client)
            set_url = f"http://127.0.0.1:{PORTS[0]}/_mock/set?events=64&delay_us={EVENT_DELAY_US}"
            (await client.get(set_url)).raise_for_status()
            seen: dict[str, list[float]] = {"livez_s": [], "lag_s": [], "rss_mb": []}
            async with process(
                generator, port, NUM_STREAMS, DURATION_S, bodies, stdout=asyncio.subprocess.PIPE
            ) as load:
                assert load.stdout is not None
                watcher = asyncio.create_task(watch(client, gateway.pid, seen))
                large = asyncio.create_task(send_large_bodies(client))
                output = await load.stdout.read()
                large.cancel()
                num_large = await large
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
            result = json.loads(output)
            with capsys.disabled():
                print("\n" + report(seen, result, num_large))
            assert result["num_errors"] == result["num_bad"] == 0
            assert result["num_done"] >= NUM_STREAMS
            assert num_large > 0
            assert await metric(client, "homing_requests_in_flight") == 0
            third = len(seen["rss_mb"]) // 3
            middle, last = seen["rss_mb"][third : 2 * third], seen["rss_mb"][-third:]
            # The allocator may keep one more large body's room than before.
            assert statistics.median(last) < 1.1 * statistics.median(middle) + LARGE_BODY_BYTES / 1e6


async def _wait_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while (await client.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.1)
