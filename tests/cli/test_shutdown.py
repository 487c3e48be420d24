"""SIGTERM under load, with real processes: nobody is cut off in time, everybody is told at the deadline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fakes import backend as fake
from fakes.gateway_process import GatewayProcess, reserved_port
from fakes.gateway_world import ProbedBackend
from fakes.redis_server import redis_server, require_redis_server

CHAT = "/v1/chat/completions"
BODY = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]}
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"Hel"}}]}\n\n'


class SteadyClient:
    """Sends one request after the other on one connection, until nobody accepts a connection any more."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self.num_answered = 0
        self.was_told_to_close = False
        self.faults: list[str] = []

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._base_url, timeout=20) as client:
            while True:
                try:
                    answer = await client.post(CHAT, json=BODY)
                except httpx.ConnectError:
                    return
                except httpx.HTTPError as error:
                    self.faults.append(repr(error))
                    continue
                if answer.status_code != 200:
                    self.faults.append(f"{answer.status_code} {answer.text}")
                self.num_answered += 1
                self.was_told_to_close |= answer.headers.get("connection") == "close"


async def test_busy_clients_lose_nothing(tmp_path: Path) -> None:
    """Keep-alive clients get every answer, the last one with `connection: close`; the process ends well
    before its drain timeout, and a stream that had begun is complete."""
    gate = asyncio.Event()
    async with ProbedBackend() as backend:
        backends = [{"id": "b0", "url": backend.base_url}]
        async with GatewayProcess(tmp_path, backends=backends, drain_timeout_s=25.0) as gateway:
            clients = [SteadyClient(gateway.base_url) for _ in range(4)]
            loads = [asyncio.ensure_future(client.run()) for client in clients]
            await gateway.wait_for(lambda: all(client.num_answered > 5 for client in clients))
            backend.default = fake.stream(EVENT, b"data: [DONE]\n\n", gates={1: gate})
            stream = asyncio.ensure_future(gateway.chat(stream=True))
            await gateway.wait_for(lambda: any(b"stream" in one.body for one in backend.requests))
            backend.default = fake.respond()
            gateway.signal(signal.SIGTERM)
            gate.set()
            await asyncio.gather(*loads)
            assert (await stream).text.endswith("data: [DONE]\n\n")
            assert await gateway.wait_ended() == 0
    assert [client.faults for client in clients] == [[]] * 4
    assert any(client.was_told_to_close for client in clients)
    assert gateway.events("drain_deadline") == []


async def test_balancers_are_told_before_the_port_closes(tmp_path: Path) -> None:
    """Readiness turns first, requests are served for the notice, and then the port closes."""
    gate = asyncio.Event()
    async with ProbedBackend() as backend:
        options: dict[str, Any] = {"leaving_notice_s": 1.0, "drain_timeout_s": 60.0}
        backends = [{"id": "b0", "url": backend.base_url}]
        async with GatewayProcess(tmp_path, backends=backends, **options) as gateway:
            backend.default = fake.stream(EVENT, b"data: [DONE]\n\n", gates={1: gate})
            stream = asyncio.ensure_future(gateway.chat(stream=True))
            await gateway.wait_for(lambda: any(b"stream" in one.body for one in backend.requests))
            backend.default = fake.respond()
            gateway.signal(signal.SIGTERM)
            statuses: list[int] = []
            is_served_unready = False
            with pytest.raises(httpx.ConnectError):  # noqa: PT012 - what came before counts
                while True:
                    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as client:
                        is_ready = (await client.get("/readyz")).status_code == 200
                        statuses.append((await client.post(CHAT, json=BODY)).status_code)
                        assert (await client.get("/livez")).status_code == 200
                    is_served_unready |= not is_ready
                    await asyncio.sleep(0.02)
            assert is_served_unready
            assert set(statuses) == {200}
            gate.set()
            assert (await stream).text.endswith("data: [DONE]\n\n")
            assert await gateway.wait_ended() == 0


async def test_the_deadline_is_told_in_band_and_may_be_given(tmp_path: Path) -> None:
    """`--drain-timeout` overrides the file; what still runs then gets an error event, not silence."""
    async with ProbedBackend() as backend:
        backend.default = fake.stream(EVENT, then="wait")
        gateway = GatewayProcess(tmp_path, backends=[{"id": "b0", "url": backend.base_url}])
        gateway.arguments = ["--drain-timeout", "0.5"]
        async with gateway, httpx.AsyncClient(base_url=gateway.base_url, timeout=20) as client:
            received = b""
            async with client.stream("POST", CHAT, json={**BODY, "stream": True}) as stream:
                with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - the bytes so far count
                    async for piece in stream.aiter_raw():
                        if not received:
                            gateway.signal(signal.SIGTERM)
                        received += piece
            last_event = received.split(b"\n\n")[-2]
            assert json.loads(last_event.removeprefix(b"data: "))["error"]["code"] == "shutting_down"
            assert await gateway.wait_ended() == 0
            assert gateway.events("drain_deadline") != []


async def test_a_second_signal_is_quick(tmp_path: Path) -> None:
    """It does not wait for a stream that never ends."""
    async with ProbedBackend() as backend:
        backend.default = fake.stream(EVENT, then="wait")
        backends = [{"id": "b0", "url": backend.base_url}]
        async with GatewayProcess(tmp_path, backends=backends, drain_timeout_s=600.0) as gateway:
            running = asyncio.ensure_future(gateway.chat(stream=True))
            await gateway.wait_for(lambda: backend.requests != [])
            gateway.signal(signal.SIGTERM)
            await gateway.wait_for(lambda: gateway.events("gateway_leaving") != [])
            gateway.signal(signal.SIGTERM)
            assert await gateway.wait_ended() == 0
            with pytest.raises(httpx.HTTPError):
                await running


@pytest.mark.redis
async def test_all_processes_reload_and_leave_together(tmp_path: Path) -> None:
    """`workers: 2` under load: SIGHUP reaches both, a killed one comes back, SIGTERM loses nothing; the
    service manager hears of both as one."""
    require_redis_server()
    (tmp_path / "redis").mkdir()
    with (
        redis_server(tmp_path / "redis") as redis,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard,
        reserved_port() as port,
    ):
        heard.bind(str(tmp_path / "manager"))
        heard.setblocking(False)
        async with ProbedBackend() as one, ProbedBackend() as two:
            specs = [{"id": name, "url": it.base_url} for name, it in (("one", one), ("two", two))]
            store = {"store": "redis", "redis": {"url": redis.url, "budget_ms": 2000}}
            gateway = GatewayProcess(
                tmp_path,
                listen={"port": port},
                workers=2,
                sessions=store,
                backends=specs[:1],
                drain_timeout_s=25.0,
                environ={"NOTIFY_SOCKET": str(tmp_path / "manager")},
            )
            async with gateway:
                async with asyncio.timeout(30):  # it is ready, and has said so, before the reload
                    assert await asyncio.get_running_loop().sock_recv(heard, 1000) == b"READY=1"
                gateway.write(backends=specs)
                gateway.signal(signal.SIGHUP)
                await gateway.wait_for(lambda: len(gateway.events("config_reloaded")) == 2)
                victim = psutil.Process(gateway.process.pid).children()[0]
                victim.kill()
                await gateway.wait_for(lambda: len(gateway.events("gateway_started")) == 3)
                clients = [SteadyClient(gateway.base_url) for _ in range(4)]
                loads = [asyncio.ensure_future(client.run()) for client in clients]
                await gateway.wait_for(lambda: all(client.num_answered > 5 for client in clients))
                signalled_s = time.monotonic()
                gateway.signal(signal.SIGTERM)
                await asyncio.gather(*loads)
                assert await gateway.wait_ended() == 0
                assert time.monotonic() - signalled_s < 25.0  # nobody had to wait for the deadline
            assert [client.faults for client in clients] == [[]] * 4
            assert len(gateway.events("worker_died")) == 1
        told = [heard.recv(1000).split(b"=")[0].decode() for _ in range(3)]
        assert told == ["RELOADING", "READY", "STOPPING"]


async def test_a_held_helper_holds_nobody(tmp_path: Path) -> None:
    """S04: the process that reads large bodies stands still; SIGTERM ends the gateway all the same."""
    body = {**BODY, "messages": [{"role": "user", "content": "x" * 5_000}]}
    async with ProbedBackend() as backend:
        backends = [{"id": "b0", "url": backend.base_url}]
        options: dict[str, Any] = {"downstream": {"max_inline_body_bytes": 1_000}, "drain_timeout_s": 0.5}
        async with (
            GatewayProcess(tmp_path, backends=backends, **options) as gateway,
            httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client,
        ):
            assert (await client.post(CHAT, json=body)).status_code == 200
            children = psutil.Process(gateway.process.pid).children()
            (helper,) = (child for child in children if "resource_tracker" not in " ".join(child.cmdline()))
            helper.suspend()
            waiting = asyncio.ensure_future(client.post(CHAT, json=body))
            await asyncio.sleep(0.1)
            gateway.signal(signal.SIGTERM)
            assert await gateway.wait_ended() == 0
            with contextlib.suppress(httpx.HTTPError):
                assert (await waiting).status_code == 503
            assert not helper.is_running()


def test_a_process_that_hangs_while_it_stops_is_ended() -> None:
    """A blocked thread or event loop is left behind at the last deadline."""
    code = "import time; from gateway.process.lifecycle import end_at_last; end_at_last(0.1); time.sleep(600)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 1


@pytest.mark.redis
async def test_a_held_worker_is_killed(tmp_path: Path) -> None:
    """One of two processes stands still: the parent ends with it, a little after the drain timeout."""
    require_redis_server()
    (tmp_path / "redis").mkdir()
    with redis_server(tmp_path / "redis") as redis, reserved_port() as port:
        async with ProbedBackend() as backend:
            gateway = GatewayProcess(
                tmp_path,
                listen={"port": port},
                workers=2,
                sessions={"store": "redis", "redis": {"url": redis.url}},
                backends=[{"id": "b0", "url": backend.base_url}],
                drain_timeout_s=0.5,
            )
            async with gateway:
                await gateway.wait_for(lambda: len(gateway.events("gateway_started")) == 2)
                held = psutil.Process(gateway.process.pid).children()[0]
                held.suspend()
                gateway.signal(signal.SIGTERM)
                await gateway.wait_ended()
                assert not held.is_running()
