"""A rolling restart of everything, under load: the topology of the Compose project as plain processes.

HAProxy with the shipped configuration, two gateways with one Redis, three engines. Every engine is drained
and restarted, then every gateway, while chats go on through the front door. No answer may be cut, no request
may fail, and a session may leave a worker only because that one leaves.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import yaml
from fakes.front_proxy import haproxy
from fakes.redis_server import free_port, redis_server
from fakes.tiny_checkpoint import write_tiny_checkpoint

from gateway.commands.up import Child

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 90.0
ADMIN = "/admin/v1"
DRAINED = "moved: home_draining"
NUM_SOAK_ROUNDS = 2

MakeEngine = Callable[[int, int, Path], Child]


@dataclass(slots=True)
class Turn:
    """One request of the load, as its client saw it."""

    session: str
    outcome: str  # complete | cut | refused | failed
    backend: str = ""
    why: str = ""  # the gateway's own words
    detail: str = ""


@dataclass(slots=True)
class Load:
    """Sessions that take one turn after the other, each with its whole history, until told to stop."""

    url: str
    model: str
    turns: list[Turn] = field(default_factory=list)
    is_over: bool = False

    async def play(self, session: str, client: aiohttp.ClientSession) -> None:
        messages = [{"role": "user", "content": f"I am {session}. " + "Tell me more. " * 20}]
        for number in itertools.count():
            if self.is_over:
                return
            self.turns.append(await self._turn(client, session, messages))
            follow_up = (
                {"role": "assistant", "content": "Well."},
                {"role": "user", "content": f"And {number}?"},
            )
            messages = [*messages, *follow_up]
            await asyncio.sleep(0.05)

    async def _turn(self, client: aiohttp.ClientSession, session: str, messages: list[Any]) -> Turn:
        body = {"model": self.model, "stream": True, "max_tokens": 12, "messages": messages}
        headers = {"x-session-id": session}
        try:
            async with client.post(self.url, json=body, headers=headers) as answer:
                text = await answer.text()
                if answer.status != 200:
                    is_retryable = answer.status == 503 and "retry-after" in answer.headers
                    return Turn(
                        session, "refused" if is_retryable else "failed", detail=f"{answer.status} {text}"
                    )
                is_whole = text.endswith("data: [DONE]\n\n") and '"error"' not in text
                backend = answer.headers["x-homing-backend"]
                why = f"{answer.headers['x-homing-affinity']}: {answer.headers['x-homing-reason']}"
                if not is_whole:
                    return Turn(session, "cut", backend, why, detail=text[-300:])
                return Turn(session, "complete", backend, why)
        except aiohttp.ClientPayloadError as error:
            return Turn(session, "cut", detail=str(error))
        except (aiohttp.ClientError, TimeoutError) as error:
            return Turn(session, "failed", detail=repr(error))

    def outcomes(self) -> collections.Counter[str]:
        return collections.Counter(turn.outcome for turn in self.turns)

    def moves(self) -> dict[str, list[str]]:
        """Of each session: why it was at another backend than before, each time."""
        homes: dict[str, str] = {}
        moves: dict[str, list[str]] = {}
        for turn in self.turns:
            if turn.backend and homes.setdefault(turn.session, turn.backend) != turn.backend:
                moves.setdefault(turn.session, []).append(turn.why)
                homes[turn.session] = turn.backend
        return moves

    def num_sessions(self) -> int:
        return len({turn.session for turn in self.turns})


class Site:
    """The processes, by name, and what an operator does to them."""

    def __init__(self, engines: dict[str, Child], gateways: dict[str, Child], admin_ports: list[int]) -> None:
        self.engines, self.gateways = engines, gateways
        self._admins = [httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") for port in admin_ports]

    async def close(self) -> None:
        for admin in self._admins:
            await admin.aclose()
        for child in (*self.gateways.values(), *self.engines.values()):
            await child.stop()

    async def start(self) -> None:
        children = (*self.engines.values(), *self.gateways.values())
        await asyncio.gather(*(child.start() for child in children))
        await asyncio.gather(*(child.wait_ready(START_LIMIT_S) for child in children))
        for name in self.engines:
            await self._until_everywhere(name, lambda one: one["state"] == "ready")

    async def roll_engine(self, name: str) -> None:
        """Drain, wait until nothing runs there, stop, start, wait until all gateways use it again."""
        await self._admins[0].post(f"{ADMIN}/backends/{name}/drain", json={"until_restart": True})
        await self._until_everywhere(name, lambda one: one["state"] == "draining" and not one["in_flight"])
        await self._restart(self.engines[name])
        await self._until_everywhere(name, lambda one: one["state"] == "ready")

    async def roll_gateway(self, name: str) -> None:
        """Stop, start, and wait until the front door sends it requests again."""
        await self._restart(self.gateways[name])
        admin = self._admins[list(self.gateways).index(name)]
        async with asyncio.timeout(START_LIMIT_S):
            while not sum((await admin.get(f"{ADMIN}/status")).json()["affinity"].values()):
                await asyncio.sleep(0.1)

    async def _restart(self, child: Child) -> None:
        """SIGTERM, and all the time it wants: being killed would be a failure."""
        assert child.process is not None
        child.process.terminate()
        async with asyncio.timeout(START_LIMIT_S):
            assert await child.process.wait() == 0, child.last_words()
        await child.start()
        await child.wait_ready(START_LIMIT_S)

    async def _until_everywhere(self, name: str, condition: Callable[[dict[str, Any]], bool]) -> None:
        async with asyncio.timeout(START_LIMIT_S):
            for admin in self._admins:
                while not condition((await admin.get(f"{ADMIN}/backends/{name}")).json()):
                    await asyncio.sleep(0.05)


def fake_engine(number: int, port: int, folder: Path) -> Child:
    return Child(
        name=f"worker-{number}",
        command=[sys.executable, str(ROOT / "tests" / "fakes" / "engine_process.py"), str(port)],
        ready_url=f"http://127.0.0.1:{port}/health",
        log_path=folder / f"worker-{number}.log",
    )


def real_worker(number: int, port: int, folder: Path) -> Child:
    model = folder / "tiny"
    if not model.exists():
        write_tiny_checkpoint(model)
    options = ["--port", str(port), "--model", str(model), "--served-model-name", "fake-model"]
    return Child(
        name=f"worker-{number}",
        command=[sys.executable, "-m", "engine_adapter.server", *options, "--num-kv-blocks", "2048"],
        ready_url=f"http://127.0.0.1:{port}/ready",
        log_path=folder / f"worker-{number}.log",
    )


def gateway_process(number: int, config: dict[str, Any], folder: Path) -> Child:
    path = folder / f"gateway-{number}.yaml"
    path.write_text(yaml.safe_dump(config))
    return Child(
        name=f"gateway-{number}",
        command=[sys.executable, "-m", "gateway.main", "gateway", "--config", str(path)],
        ready_url=f"http://127.0.0.1:{config['admin']['port']}/livez",  # it opens the admin port last
        log_path=folder / f"gateway-{number}.log",
    )


@contextlib.asynccontextmanager
async def compose_topology(make_engine: MakeEngine, folder: Path) -> AsyncIterator[tuple[Site, str]]:
    """What deploy/compose says, on loopback ports: its gateway configuration with other addresses."""
    shipped = yaml.safe_load((ROOT / "deploy" / "compose" / "homing.yaml").read_text())
    engine_ports = [free_port() for _ in range(3)]
    ports, admin_ports = [free_port(), free_port()], [free_port(), free_port()]
    engines = {f"worker-{n}": make_engine(n, port, folder) for n, port in enumerate(engine_ports, start=1)}
    with redis_server(folder) as redis:
        gateways = {}
        for number in (0, 1):
            config = shipped | {
                "listen": {"port": ports[number]},
                "admin": {"port": admin_ports[number]},
                "sessions": {"store": "redis", "redis": {"url": redis.url, "budget_ms": 500}},
                "backends": [
                    {"id": name, "url": f"http://127.0.0.1:{port}", "engine": "torch"}
                    for name, port in zip(engines, engine_ports, strict=True)
                ],
            }
            gateways[f"gateway-{number + 1}"] = gateway_process(number + 1, config, folder)
        site = Site(engines, gateways, admin_ports)
        try:
            await site.start()
            proxy = haproxy(free_port(), (ports[0], ports[1]), folder)
            url = await asyncio.to_thread(proxy.__enter__)
            try:
                yield site, f"{url}/v1/chat/completions"
            finally:
                await asyncio.to_thread(proxy.__exit__, None, None, None)
        finally:
            await site.close()


@pytest.fixture(autouse=True)
def _source_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes run this checkout."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "cuda"))))


async def roll_everything(
    make_engine: MakeEngine, folder: Path, *, num_sessions: int, num_rounds: int
) -> dict[str, Any]:
    """Returns what happened, after asserting that nothing was lost."""
    async with compose_topology(make_engine, folder) as (site, url):
        load = Load(url, "fake-model")
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=timeout) as client, asyncio.TaskGroup() as players:
            for number in range(num_sessions):
                players.create_task(load.play(f"session-{number}", client))
            async with asyncio.timeout(START_LIMIT_S):
                while load.num_sessions() < num_sessions:
                    await asyncio.sleep(0.1)
            for _ in range(num_rounds):
                for name in site.engines:
                    await site.roll_engine(name)
                for name in site.gateways:
                    await site.roll_gateway(name)
            load.is_over = True
    bad = [turn for turn in load.turns if turn.outcome in ("cut", "failed")]
    assert not bad, bad[:5]
    # rolled one after the other, a home may be one that is drained later: each drain moves a session once
    drains = [sum(why == DRAINED for why in reasons) for reasons in load.moves().values()]
    assert max(drains) <= len(site.engines) * num_rounds, load.moves()
    return {
        "turns": len(load.turns),
        "outcomes": dict(load.outcomes()),
        "moves": collections.Counter(why for reasons in load.moves().values() for why in reasons),
        "drains by session": collections.Counter(drains),
    }


@pytest.mark.redis
async def test_rolling_restart_cuts_nothing(tmp_path: Path) -> None:
    """Fake engines: every turn is whole, none is refused, and only a drain moves a session."""
    result = await roll_everything(fake_engine, tmp_path, num_sessions=12, num_rounds=1)
    assert result["outcomes"] == {"complete": result["turns"]}, json.dumps(result)
    assert set(result["moves"]) == {DRAINED}, json.dumps(result)


@pytest.mark.redis
@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_rolling_restart_of_real_workers_cuts_nothing(tmp_path: Path) -> None:
    """The long form: our own worker with a tiny model. It has real work, so that moving a session to an idle
    worker may pay; nothing else but a drain may move one."""
    result = await roll_everything(real_worker, tmp_path, num_sessions=16, num_rounds=NUM_SOAK_ROUNDS)
    print(result)
    assert all(why == DRAINED or why.startswith("spilled: ") for why in result["moves"]), result
