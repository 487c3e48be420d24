"""`homing health`: the exit status that a container's health check looks at."""

from __future__ import annotations

import asyncio

import pytest
from fakes.gateway_world import GatewayWorld
from fakes.redis_server import free_port

from gateway.main import main


async def health(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["health", *arguments])


async def test_it_tells_alive_from_ready(capsys: pytest.CaptureFixture[str]) -> None:
    """A gateway without backends is alive and ready (0), but not if asked for one (1, with the status)."""
    async with GatewayWorld(num_backends=1) as world:
        assert await health(f"{world.base_url}/readyz?min_backends=1") == 0
        world.backends[0].cut_all()
        await world.admin.delete("/admin/v1/backends/b0")
        assert await health(f"{world.base_url}/livez") == 0
        assert await health(f"{world.base_url}/readyz") == 0
        assert await health(f"{world.base_url}/readyz?min_backends=1") == 1
    assert "answered 503" in capsys.readouterr().err


async def test_nobody_there_is_unhealthy(capsys: pytest.CaptureFixture[str]) -> None:
    """Connection refused: 1 and one line."""
    assert await health(f"http://127.0.0.1:{free_port()}/livez") == 1
    assert capsys.readouterr().err.count("\n") == 1


async def test_other_schemes_are_a_usage_error() -> None:
    """No file is opened."""
    assert await health("file:///etc/passwd") == 2
