"""`workers: 2`: two processes on one port give the same answers, share orders, and survive each other."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from fakes.gateway_world import ProbedBackend
from fakes.redis_server import free_port, redis_server, require_redis_server

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]


async def wait_ready(*admin_ports: int) -> None:
    """Until each process has its backends ready, as its own admin listener tells."""
    async with httpx.AsyncClient() as client, asyncio.timeout(60):
        for port in admin_ports:
            while not await is_ready(client, port):
                await asyncio.sleep(0.1)


async def is_ready(client: httpx.AsyncClient, port: int) -> bool:
    try:
        backends = (await client.get(f"http://127.0.0.1:{port}/admin/v1/backends")).json()["backends"]
    except httpx.HTTPError:
        return False
    return all(one["state"] == "ready" for one in backends)


async def chat(port: int, session: str) -> httpx.Response:
    """On a connection of its own, so that either process may get it."""
    body = {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]}
    async with httpx.AsyncClient(timeout=20) as client:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        return await client.post(url, json=body, headers={"x-session-id": session})


async def test_two_processes_are_one_gateway(tmp_path: Path) -> None:
    """Sessions are sticky over both; a killed process costs no later request; SIGTERM ends all with 0."""
    require_redis_server()
    port, admin_port = free_port(), free_port()
    with redis_server(tmp_path) as redis:
        async with ProbedBackend() as one, ProbedBackend() as two:
            config = tmp_path / "homing.yaml"
            config.write_text(
                f"listen: {{port: {port}}}\nadmin: {{port: {admin_port}}}\nworkers: 2\n"
                f"sessions: {{store: redis, redis: {{url: '{redis.url}', budget_ms: 500}}}}\n"
                f"backends: [{{id: one, url: '{one.base_url}'}}, {{id: two, url: '{two.base_url}'}}]\n"
            )
            command = [sys.executable, "-m", "gateway.main", "gateway", "--config", str(config)]
            process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
            try:
                await wait_ready(admin_port, admin_port + 1)
                for session in range(10):
                    homes = {(await chat(port, f"s{session}")).headers["x-homing-backend"] for _ in range(6)}
                    assert len(homes) == 1
                psutil.Process(process.pid).children()[0].kill()
                answers = [await chat(port, "after") for _ in range(10)]
                assert {answer.status_code for answer in answers} == {200}
                process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(process.communicate, timeout=30)
                assert process.returncode == 0
            finally:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
