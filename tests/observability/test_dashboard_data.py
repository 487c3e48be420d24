"""The dashboards on a real Prometheus that scrapes a real gateway on a bad day: no panel is empty."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fakes.backend import Behaviour, Turn, openai_answer, reset, respond
from fakes.gateway_world import GatewayWorld
from fakes.raw_client import RawClient, post
from fakes.redis_server import RedisProcess, free_port, redis_server

ROOT = Path(__file__).parents[2]
LIMIT_S = 30.0
GOOD = openai_answer("hello there", cached_tokens=4)
CHAT = b'{"model":"fake-model","messages":[{"role":"user","content":"hi"}]}'


@contextlib.asynccontextmanager
async def prometheus(folder: Path, gateway_port: int) -> AsyncIterator[httpx.AsyncClient]:
    """A Prometheus with our rules that looks five times a second."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (tests/install-system-packages.sh)")
    shutil.copytree(ROOT / "deploy" / "prometheus", folder, dirs_exist_ok=True)
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"}
    target = {"targets": [f"127.0.0.1:{gateway_port}"]}
    config["scrape_configs"] = [{"job_name": "homing", "static_configs": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=10) as client:
            await until(lambda: is_ready(client))
            yield client
    finally:
        process.kill()
        process.wait()


async def is_ready(client: httpx.AsyncClient) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return (await client.get("/-/ready")).status_code == 200
    return False


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Polls: a process offers no other way to be waited for."""
    async with asyncio.timeout(LIMIT_S):
        while not await condition():
            await asyncio.sleep(0.05)


def answer_all(world: GatewayWorld, behaviour: Behaviour) -> None:
    for backend in world.backends:
        backend.default = behaviour


def answer_after(gate: asyncio.Event) -> Behaviour:
    async def behave(turn: Turn) -> None:
        await gate.wait()
        await GOOD(turn)

    return behave


async def a_bad_hour(world: GatewayWorld) -> None:
    """All that the panels are about: turns, answers without numbers, failures, crowds, clients that leave."""
    answer_all(world, GOOD)
    for turn in range(3):
        for number in range(12):
            await world.chat(f"s{number}", stream=turn > 0)
    answer_all(world, respond(b"{}"))
    await world.chat("says-nothing")
    answer_all(world, GOOD)
    world.backends[0].default = reset()
    for number in range(12):
        await world.chat(f"s{number}")
    gate = asyncio.Event()
    answer_all(world, answer_after(gate))
    async with RawClient(world.gateway.port) as leaver:
        await leaver.send(post("/v1/chat/completions", CHAT))
        await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 1)
    await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 0)
    num_refused = sum(world.gateway.admission.room.rejections.values())
    async with asyncio.TaskGroup() as crowd:
        for number in range(4):  # two are served, one waits in vain, one is refused
            crowd.create_task(world.chat(f"crowd-{number}"))
        await world.wait_for(lambda: sum(world.gateway.admission.room.rejections.values()) == num_refused + 2)
        gate.set()


def panels() -> Iterator[tuple[str, str]]:
    """Where it stands, and its expression over a window that fits a short life."""
    for path in sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                expression = target["expr"].replace("$__rate_interval", "1m")
                yield f"{path.name}: {panel['title']}: {target['refId']}", expression


async def has_data(client: httpx.AsyncClient, expression: str) -> bool:
    answer = await client.get("/api/v1/query", params={"query": expression})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return any(not math.isnan(float(series["value"][1])) for series in found)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with redis_server(tmp_path / "redis") as server:
        yield server


async def test_every_panel_shows_something(tmp_path: Path, redis: RedisProcess) -> None:
    """Each expression finds numbers: names, labels and rules fit what a gateway really shows."""
    settings = {"store": "redis", "redis": {"url": redis.url}}
    limits = {"max_in_flight": 2, "queue_size": 1, "queue_timeout_s": 0.2}
    async with (
        GatewayWorld(3, sessions=settings, limits=limits) as world,
        prometheus(tmp_path / "prometheus", world.gateway.port) as client,
    ):
        await a_bad_hour(world)
        await until(lambda: has_data(client, "homing_queue_wait_seconds_count > 0"))  # rates need a beginning
        redis.kill()
        await world.chat("the store is away")
        empty = dict(panels())
        assert len(empty) > 40

        async def is_none_empty() -> bool:
            await a_bad_hour(world)  # a quantile of a rate is a number only while something moves
            for place, expression in list(empty.items()):
                if await has_data(client, expression):
                    del empty[place]
            return not empty

        with contextlib.suppress(TimeoutError):
            await until(is_none_empty)
        assert not empty
