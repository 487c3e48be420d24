"""What a stopping worker runs first, in its pod and under systemd: it drains itself, if it can."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.gateway_world import GatewayWorld
from fakes.helm_chart import render

ROOT = Path(__file__).parents[2]


def pod_hook() -> list[str]:
    """The preStop command of the chart's worker."""
    spec = render().pod_specs()["homing-worker"]
    command: list[str] = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    return command


def unit_hook() -> list[str]:
    """The ExecStop of the worker's unit, with its variable as systemd would fill it in."""
    text = (ROOT / "deploy" / "systemd" / "homing-worker@.service").read_text()
    line = re.search(r"^ExecStop=-(.+)$", text, re.MULTILINE)
    assert line is not None
    return shlex.split(line[1].replace("/opt/homing/bin/", "").replace("${BACKEND_ID}", "b0"))


async def run_hook(command: list[str], admin_url: str) -> int:
    """Run it as the pod would: by name, with what its environment holds."""
    environ = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "POD_NAME": "b0",
        "HOMING_ADMIN_URL": admin_url,
        "HOMING_ADMIN_TOKEN": "secret",
    }
    process = await asyncio.create_subprocess_exec(*command, env=environ)
    async with asyncio.timeout(60):
        return await process.wait()


@pytest.mark.parametrize("hook", [pod_hook, unit_hook])
async def test_a_stopping_worker_drains_itself(hook: Callable[[], list[str]]) -> None:
    """The hook returns once nobody lives there any more; the drain is for this life of the worker only."""
    async with GatewayWorld(num_backends=2, environ={"HOMING_ADMIN_TOKEN": "secret"}) as world:
        assert await run_hook(hook(), str(world.admin.base_url)) == 0
        assert world.state(0) == "draining"
        port = world.backends[0].port
        await world.backends[0].stop()
        await world.wait_for(lambda: world.state(0) == "down")
        world.backends[0].start_time_s += 100
        await world.backends[0].start(port)
        await world.wait_for(lambda: world.state(0) == "ready")


async def test_without_a_gateway_the_pod_stops_all_the_same() -> None:
    """Nobody answers at the admin address: the hook succeeds at once."""
    assert await run_hook(pod_hook(), "http://127.0.0.1:1") == 0
