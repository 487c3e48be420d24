"""What a 20 MB body does to other streams: `pytest -m bench tests/bench/bench_large_bodies.py -s`.

The gateway runs here on uvloop beside a probe of its event loop; backends and clients run in a process of
their own. 50 streams get an event every 20 ms while bodies of 20 MB of several shapes come one after the
other. Printed per shape: how late the loop ran at worst, and how long the request took. The first line,
without a large body, is what this machine does by itself.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import sys
import time
from collections.abc import Callable

import pytest
import uvloop

pytestmark = pytest.mark.bench

BODY_BYTES = 20_000_000
NUM_STREAMS = 50
ROUNDS = 3
PROBE_S = 0.002


def _text(num_bytes: int, seed: int = 1) -> str:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2_000)]
    return " ".join(rng.choices(words, k=num_bytes // 5))[:num_bytes]


def _messages(*contents: object) -> list[dict[str, object]]:
    return [
        {"role": "assistant" if index % 2 else "user", "content": content}
        for index, content in enumerate(contents)
    ]


def _shapes() -> dict[str, list[dict[str, object]]]:
    text = _text(2_000_000)
    picture = (
        "data:image/png;base64," + base64.b64encode(random.Random(1).randbytes(BODY_BYTES * 3 // 4)).decode()
    )
    return {
        "nothing": [],
        "one message of text": _messages(text * 10),
        "1,000 messages": _messages(*(text[at : at + 20_000] for at in range(0, 1_980_000, 1_980))),
        "100,000 messages": _messages(*(text[at : at + 160] for at in range(100_000))),
        "escaped code": _messages(*[text.replace(" ", '\n\t"')[:1_500_000]] * 10),
        "a picture": _messages([{"type": "image_url", "image_url": {"url": picture}}]),
        "a system prompt": [
            {"role": "system", "content": text * 10},
            {"role": "user", "content": "hello there"},
        ],
    }


def test_large_bodies() -> None:
    """Prints a table."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_measure())


async def _measure() -> None:
    from gateway.config.config import parse_config
    from gateway.process.gateway import Gateway

    load = await asyncio.create_subprocess_exec(
        sys.executable, __file__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert load.stdin is not None
    assert load.stdout is not None
    backend_port = int(await load.stdout.readline())
    config = {
        "listen": {"port": 0},
        "admin": {"is_enabled": False},
        "log": {"access": False},
        "backends": [{"url": f"http://127.0.0.1:{backend_port}"}],
    }
    gateway = Gateway(parse_config(config))
    await gateway.start()
    probe = _LoopProbe()
    load.stdin.write(b"%d\n" % gateway.port)
    print(f"\n{'body':<22} {'loop late by at most, ms':>24} {'request, ms':>12}")
    while name := (await load.stdout.readline()).decode().strip():
        worst_s = []
        took_s = []
        for _ in range(ROUNDS):
            probe.take_worst_s()
            load.stdin.write(b"go\n")
            took_s.append(float(await load.stdout.readline()))
            worst_s.append(probe.take_worst_s())
        print(f"{name:<22} {min(worst_s) * 1e3:11.1f} .. {max(worst_s) * 1e3:9.1f} {min(took_s) * 1e3:12.1f}")
    await load.wait()
    await gateway.stop(drain_timeout_s=0)


class _LoopProbe:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._worst_s = 0.0
        self._schedule()

    def _schedule(self) -> None:
        self._due_s = time.perf_counter() + PROBE_S
        self._loop.call_later(PROBE_S, self._tick)

    def _tick(self) -> None:
        self._worst_s = max(self._worst_s, time.perf_counter() - self._due_s)
        self._schedule()

    def take_worst_s(self) -> float:
        worst_s, self._worst_s = self._worst_s, 0.0
        return worst_s


# -- the other process


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine: endless events where `/v1/completions` is asked, a short answer elsewhere."""
    event = b'data: {"choices":[{"text":" word"}]}\n\n'
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        length = next(
            (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0"
        )
        await reader.readexactly(int(length.partition(b":")[2]))
        if b"/v1/completions" not in head:
            models = b'{"data":[{"id":"m"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(models), models))
            continue
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await asyncio.sleep(0.02)


async def _post(port: int, path: str, body: bytes, until: Callable[[bytes], bool]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST %b HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body
    )
    while data := await reader.read(65_536):
        if until(data):
            break
    writer.close()


async def _load() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, limit=1 << 25)
    loop = asyncio.get_running_loop()
    shapes = {
        name: json.dumps({"model": "m", "messages": messages}).encode()
        for name, messages in _shapes().items()
    }
    print(server.sockets[0].getsockname()[1], flush=True)
    port = int(await loop.run_in_executor(None, sys.stdin.readline))
    await asyncio.sleep(2)
    prompt = b'{"model":"m","prompt":"x","stream":true}'
    background = [
        asyncio.ensure_future(_post(port, "/v1/completions", prompt, lambda _: False))
        for _ in range(NUM_STREAMS)
    ]
    await asyncio.sleep(1)
    for name, body in shapes.items():
        print(name, flush=True)
        for _ in range(ROUNDS):
            await loop.run_in_executor(None, sys.stdin.readline)
            started_s = time.perf_counter()
            if name == "nothing":
                await asyncio.sleep(0.5)
            else:
                await _post(port, "/v1/chat/completions", body, lambda _: True)
            print(time.perf_counter() - started_s, flush=True)
            await asyncio.sleep(0.3)
    print(flush=True)
    assert len(background) == NUM_STREAMS
    os._exit(0)  # the streams have no end


if __name__ == "__main__":
    asyncio.run(_load())
