"""`make soak`: 1,500 concurrent streams on one gateway process for five minutes, with large bodies between.

A C engine behind it and C clients before it, so that the gateway is the only Python in the way. First at a
pace that one core carries, for HOMING_SOAK_S seconds (300), one event per stream every HOMING_SOAK_PACE_MS
(170); then for a fifth of that time at more than it can carry. How late the loop is says something about the
gateway only in the first; in the second it is the length of the queue. Both are printed, with the CPU that
was used and the time that the gateway waited for one, and asserted is only what no busy machine may change:
no error, flat memory, gauges at zero. Engine and clients keep to one core, so that they cannot take the
gateway's; the probe (`loop_probe.py`) shares that one.
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
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

TOOLS = Path(__file__).resolve().parents[1] / "bench" / "gateway"
DURATION_S = float(os.environ.get("HOMING_SOAK_S", "300"))
NUM_STREAMS = 1_500
PACE_MS = float(os.environ.get("HOMING_SOAK_PACE_MS", "170"))  # 8,800 events per second
SATURATING_PACE_MS = 40.0
EVENTS_PER_STREAM = 64
NUM_CLIENTS = 15  # begin one after the other: streams that all end at once would be a storm of requests
MAX_PROBE_LINE_BYTES = 1 << 24
LARGE_BODY_BYTES = 20_000_000
PORTS = (28_201, 28_202, 28_203, 28_204)


def compile_tool(name: str, folder: Path) -> Path:
    program = folder / name
    subprocess.run(["cc", "-O2", "-o", program, TOOLS / f"{name}.c"], check=True)
    return program


@asynccontextmanager
async def process(*command: object, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(*map(str, command), **options)
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


@asynccontextmanager
async def one_core() -> AsyncIterator[None]:
    """Keep this process, and those that it starts meanwhile, on the first core that it may use."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


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


def scheduled_s(pid: int) -> tuple[float, float]:
    """What a process's first thread ran, and what it waited for a CPU while it could have run (Linux)."""
    ran, waited, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


@dataclass(kw_only=True)
class Seen:
    """What was seen of the gateway while it was under load."""

    livez_s: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    cpu_share: float = 0.0
    loop_share: float = 0.0
    waiting_share: float = 0.0
    num_large: int = 0
    load: dict[str, float] = field(default_factory=dict)


def started_probe(port: int) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    script = Path(__file__).with_name("loop_probe.py")
    return process(sys.executable, script, port, stdin=pipe, stdout=pipe, limit=MAX_PROBE_LINE_BYTES)


async def take_waits_s(probe: asyncio.subprocess.Process) -> list[float]:
    """How long the loop let a request wait that costs it nothing, since last asked: as every event waits."""
    assert probe.stdin is not None
    assert probe.stdout is not None
    probe.stdin.write(b"\n")
    waits_s: list[float] = json.loads(await probe.stdout.readline())
    return waits_s


async def watch(client: httpx.AsyncClient, pid: int, seen: Seen) -> None:
    """Once a second: memory, and a scrape of the metrics, as in service."""
    while True:
        (await client.get("/metrics")).raise_for_status()
        seen.rss_mb.append(psutil.Process(pid).memory_info().rss / 1e6)
        await asyncio.sleep(1)


async def send_large_bodies(base_url: httpx.URL, seen: Seen, load: asyncio.Task[dict[str, float]]) -> None:
    """A 20 MB body now and then, as long as there is load.

    From a thread: to write one would hold the loop of the probes longer than any gateway does.
    """
    body = json.dumps(
        {"model": "mock-model", "messages": [{"role": "user", "content": "x" * LARGE_BODY_BYTES}]}
    ).encode()
    with httpx.Client(base_url=base_url, timeout=60) as client:
        while not load.done():
            answer = await asyncio.to_thread(client.post, "/v1/chat/completions", content=body)
            answer.raise_for_status()
            seen.num_large += 1
            await asyncio.wait((load,), timeout=2)


async def run_streams(
    generator: Path, port: int, bodies: Path, *, pace_ms: float, duration_s: float
) -> dict[str, float]:
    """All clients, spread over the length of one stream; returns their sums, and the worst of their times."""
    stagger_s = EVENTS_PER_STREAM * pace_ms / 1e3 / NUM_CLIENTS

    async def run_one(number: int) -> dict[str, float]:
        await asyncio.sleep(number * stagger_s)
        command = (generator, port, NUM_STREAMS // NUM_CLIENTS, duration_s - number * stagger_s, bodies)
        async with process(*command, stdout=asyncio.subprocess.PIPE) as client:
            assert client.stdout is not None
            result: dict[str, float] = json.loads(await client.stdout.read())
            return result

    results = await asyncio.gather(*[run_one(number) for number in range(NUM_CLIENTS)])
    return {
        name: (max if name.endswith(("_us", "_s", "_status")) else sum)(one[name] for one in results)
        for name in results[0]
    }


async def observe_phase(
    client: httpx.AsyncClient,
    gateway: psutil.Process,
    probe: asyncio.subprocess.Process,
    streams: Coroutine[None, None, dict[str, float]],
) -> Seen:
    """One phase: the streams, with probes, scrapes and large bodies beside them."""
    seen = Seen()
    await take_waits_s(probe)
    load = asyncio.create_task(streams)
    watching = asyncio.create_task(watch(client, gateway.pid, seen))
    before, (ran_s, waited_s) = sum(gateway.cpu_times()[:2]), scheduled_s(gateway.pid)
    started_s = time.monotonic()
    try:
        await send_large_bodies(client.base_url, seen, load)
        seen.load = await load
    finally:
        for task in (load, watching):
            task.cancel()
        (outcome,) = await asyncio.gather(watching, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError), outcome
    seen.livez_s = await take_waits_s(probe)
    took_s, now_s = time.monotonic() - started_s, scheduled_s(gateway.pid)
    seen.cpu_share = (sum(gateway.cpu_times()[:2]) - before) / took_s
    seen.loop_share, seen.waiting_share = (now_s[0] - ran_s) / took_s, (now_s[1] - waited_s) / took_s
    return seen


def report(title: str, seen: Seen) -> str:
    load, rss_mb = seen.load, seen.rss_mb
    waits_ms = [value * 1e3 for value in sorted(seen.livez_s)]
    p50_ms, p99_ms = statistics.median(waits_ms), waits_ms[int(len(waits_ms) * 0.99)]
    per_s = load["num_events"] / load["elapsed_s"]
    lines = [
        f"-- {title}: {per_s:,.0f} events/s, {seen.cpu_share:.0%} of a core "
        f"(its loop {seen.loop_share:.0%}, and {seen.waiting_share:.0%} of the time that waited for a core)",
        f"streams {load['num_done']:.0f}, events {load['num_events']:.0f}, 20 MB bodies {seen.num_large}",
        f"errors {load['num_errors']}, not 200: {load['num_bad']} (last: {load['last_bad_status']})",
        f"first event, worst client: p50 {load['first_byte_p50_us'] / 1e3:.1f} ms, "
        f"p99 {load['first_byte_p99_us'] / 1e3:.1f} ms",
        f"wait for the loop (/livez): p50 {p50_ms:.1f} ms, p99 {p99_ms:.1f} ms, max {waits_ms[-1]:.1f} ms",
        f"RSS by tenths, MB: {' '.join(f'{value:.0f}' for value in rss_mb[:: max(1, len(rss_mb) // 10)])}",
    ]
    return "\n".join(lines)


def check(seen: Seen) -> None:
    assert seen.load["num_errors"] == seen.load["num_bad"] == 0
    assert seen.load["num_done"] >= NUM_STREAMS
    assert seen.num_large > 0


@pytest.mark.soak
@pytest.mark.timeout(2 * DURATION_S + 240)
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
    command = (homing, "gateway", "--config", tmp_path / "homing.yaml")
    async with (
        process(*command, stderr=asyncio.subprocess.PIPE) as gateway,
        started_probe(port := await started_port(gateway)) as probe,
        one_core(),
        process(engine, *PORTS),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        await _wait_ready(client)
        for title, pace_ms, duration_s in (
            ("carried", PACE_MS, DURATION_S),
            ("saturated", SATURATING_PACE_MS, DURATION_S / 5),
        ):
            query = f"events={EVENTS_PER_STREAM}&delay_us={pace_ms * 1e3:.0f}"
            (await client.get(f"http://127.0.0.1:{PORTS[0]}/_mock/set?{query}")).raise_for_status()
            streams = run_streams(generator, port, bodies, pace_ms=pace_ms, duration_s=duration_s)
            seen = await observe_phase(client, psutil.Process(gateway.pid), probe, streams)
            with capsys.disabled():
                print("\n" + report(title, seen))
            check(seen)
            assert await metric(client, "homing_requests_in_flight") == 0
            if title == "carried":
                check_memory(seen.rss_mb)


def check_memory(rss_mb: list[float]) -> None:
    """Flat after the first third. The allocator may keep one more large body's room than before."""
    third = len(rss_mb) // 3
    middle, last = rss_mb[third : 2 * third], rss_mb[-third:]
    assert statistics.median(last) < 1.1 * statistics.median(middle) + LARGE_BODY_BYTES / 1e6


async def _wait_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while (await client.get("/readyz?min_backends=1")).status_code != 200:
            await asyncio.sleep(0.1)
