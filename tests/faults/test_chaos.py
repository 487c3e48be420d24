"""`make soak`: three gateways, Redis, six engines, agents that grow, abort and retry; a fault every 4 s.

HOMING_CHAOS_S (900) says for how long, HOMING_CHAOS_SEED which faults. Every request ends in a complete
answer or a clear error; no answer is another conversation's; an error is only told where content had come, or
where a gateway was leaving; at the end all is as it was, and both sides have counted the same.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.gateway_process import GatewayProcess
from fakes.redis_server import RedisProcess, free_port, redis_server, require_redis_server

ENGINE = Path(__file__).parents[1] / "fakes" / "chaos_engine.py"
DURATION_S = float(os.environ.get("HOMING_CHAOS_S", "900"))
SEED = int(os.environ.get("HOMING_CHAOS_SEED", "1"))
NUM_AGENTS = 30
NUM_TURNS = 8
ABORT_SHARE = 0.04
PAUSE_S = 4.0  # between faults
LONGEST_S = 60.0  # a request that takes longer hangs
HEALING_S = 60.0
CHAT = "/v1/chat/completions"
# What a client may be told, and why.
AFTER_CONTENT = {"upstream_truncated", "upstream_reset", "InternalServerError"}
LEAVING = {"shutting_down"}


class Engine:
    """One engine process, over all its lives."""

    def __init__(self, number: int) -> None:
        self.name, self.port = f"e{number}", free_port()
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, str(ENGINE), str(self.port)], stderr=subprocess.DEVNULL)

    def restart(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process = self._start()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


class Tally:
    """What clients saw."""

    def __init__(self) -> None:
        self.ends: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.longest_s = 0.0
        self.homes: list[tuple[float, bool]] = []  # when a later turn ended, and whether it was a hit


class Agent:
    """One user: conversations that grow by a turn, on whatever gateway answers."""

    def __init__(self, gateways: list[GatewayProcess], tally: Tally, seed: int) -> None:
        self._gateways, self._tally, self._random = gateways, tally, random.Random(seed)

    async def run(self, until_s: float) -> None:
        number = 0
        async with httpx.AsyncClient(timeout=LONGEST_S) as client:
            while time.monotonic() < until_s:
                number += 1
                mark = f"m{self._random.getrandbits(48):012x}n{number}"
                messages = [{"role": "system", "content": mark}]
                for turn in range(NUM_TURNS):
                    messages.append({"role": "user", "content": f"turn {turn} of {mark}"})
                    if time.monotonic() > until_s or not await self._turn(client, mark, messages):
                        break
                    messages.append({"role": "assistant", "content": mark})

    async def _turn(self, client: httpx.AsyncClient, mark: str, messages: list[dict[str, str]]) -> bool:
        """One turn, repeated at another gateway until it is complete. False: the user has left."""
        for _ in range(20):
            gateway = self._random.choice(self._gateways)
            begun_s = time.monotonic()
            end = await self._ask(client, gateway, mark, messages)
            self._tally.longest_s = max(self._tally.longest_s, time.monotonic() - begun_s)
            self._tally.ends[end] += 1
            if end in ("complete", "left"):
                return end == "complete"
            await asyncio.sleep(self._random.uniform(0.05, 0.5))
        self._tally.wrong.append(f"{mark}: no complete answer in 20 tries")
        return False

    async def _ask(
        self, client: httpx.AsyncClient, gateway: GatewayProcess, mark: str, messages: list[dict[str, str]]
    ) -> str:
        body = {"model": "fake-model", "messages": messages, "stream": True}
        url = f"http://127.0.0.1:{gateway.sections['listen']['port']}{CHAT}"
        leaves_after = self._random.randrange(1, 6) if self._random.random() < ABORT_SHARE else None
        events: list[bytes] = []
        try:
            async with client.stream("POST", url, json=body, headers={"x-session-id": mark}) as answer:
                if answer.status_code != 200:
                    return self._judge_refusal(answer.status_code, await answer.aread())
                async for event in _events(answer):
                    events.append(event)
                    if leaves_after is not None and len(events) >= leaves_after:
                        return "left"
                is_hit = answer.headers["x-homing-affinity"] == "hit"
        except httpx.ConnectError:
            return "no gateway there"
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            return self._judge_broken(events)
        if len(messages) > 2:
            self._tally.homes.append((time.monotonic(), is_hit))
        return self._judge(mark, events)

    def _judge_refusal(self, status: int, body: bytes) -> str:
        code = json.loads(body)["error"]["code"]
        if code not in LEAVING:
            self._tally.wrong.append(f"{time.time():.1f} {status} {body[:300]!r}")
        return f"error {code}"

    def _judge_broken(self, events: list[bytes]) -> str:
        """Cut off: allowed behind an error event, or where nothing had come and the gateway was leaving."""
        if not events:
            return "cut off with the gateway"
        code = _error_of(events[-1])
        if code not in AFTER_CONTENT | LEAVING:
            self._tally.wrong.append(f"{time.time():.1f} cut off after {events[-1]!r}")
        return f"in band {code}"

    def _judge(self, mark: str, events: list[bytes]) -> str:
        if not events:
            self._tally.wrong.append(f"{mark}: an empty answer")
            return "empty"
        payloads = [json.loads(event[6:]) for event in events if event != b"data: [DONE]"]
        for payload in payloads:
            for choice in payload.get("choices", ()):
                if choice["delta"].get("content", f"{mark} ") != f"{mark} ":
                    self._tally.wrong.append(f"{mark} got {choice}")
        code = _error_of(events[-2] if events[-1:] == [b"data: [DONE]"] and len(events) > 1 else events[-1])
        if code is not None:
            if len(payloads) < 2 or code not in AFTER_CONTENT | LEAVING:
                self._tally.wrong.append(f"{time.time():.1f} error without content before it: {events}")
            return f"in band {code}"
        reasons = [choice["finish_reason"] for payload in payloads for choice in payload["choices"]]
        if events[-1:] != [b"data: [DONE]"] or reasons[-1:] != ["stop"]:
            self._tally.wrong.append(f"{mark}: ends well and is not complete: {events[-2:]}")
        return "complete"


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    waiting = b""
    async for piece in answer.aiter_raw():
        *whole, waiting = (waiting + piece).split(b"\n\n")
        for event in whole:
            if event.startswith(b"data:"):
                yield event
    assert not waiting.strip(), waiting


def _error_of(event: bytes) -> str | None:
    if event == b"data: [DONE]":
        return None
    error = json.loads(event[6:]).get("error")
    return None if error is None else str(error["code"] if isinstance(error["code"], str) else error["type"])


class Chaos:
    """Does one thing after the other to the fleet, and undoes it."""

    def __init__(self, gateways: list[GatewayProcess], engines: list[Engine], redis: RedisProcess) -> None:
        self._gateways, self._engines, self._redis = gateways, engines, redis
        self._random = random.Random(SEED)
        self.done: collections.Counter[str] = collections.Counter()

    async def run(self, until_s: float) -> None:
        faults: list[Callable[[], Awaitable[None]]] = [
            self.kill_engine,
            self.freeze_engine,
            self.fail_before_content,
            self.fail_after_content,
            self.drain,
            self.reload,
            self.restart_gateway,
            self.freeze_redis,
            self.empty_redis,
        ]
        while time.monotonic() < until_s:
            self._random.shuffle(faults)
            for fault in faults:
                if time.monotonic() < until_s:
                    self.done[fault.__name__] += 1
                    await fault()
                    await asyncio.sleep(self._random.uniform(0.5, 1.5) * PAUSE_S)

    async def kill_engine(self) -> None:
        self._random.choice(self._engines).restart()

    async def freeze_engine(self) -> None:
        engine = self._random.choice(self._engines)
        engine.signal(signal.SIGSTOP)
        await asyncio.sleep(3)
        engine.signal(signal.SIGCONT)

    async def fail_before_content(self) -> None:
        self._random.choice(self._engines).signal(signal.SIGUSR1)

    async def fail_after_content(self) -> None:
        self._random.choice(self._engines).signal(signal.SIGUSR2)

    async def drain(self) -> None:
        gateway, engine = self._random.choice(self._gateways), self._random.choice(self._engines)
        await self._order(gateway, engine, "drain")
        await asyncio.sleep(4)
        await self._order(self._random.choice(self._gateways), engine, "undrain")

    async def _order(self, gateway: GatewayProcess, engine: Engine, order: str) -> None:
        url = f"http://127.0.0.1:{gateway.sections['admin']['port']}/admin/v1/backends/{engine.name}/{order}"
        async with httpx.AsyncClient(timeout=20) as client:
            assert (await client.post(url)).status_code in (200, 202), order

    async def reload(self) -> None:
        gateway = self._random.choice(self._gateways)
        gateway.write(key_watch={"max_conversations_per_key": self._random.randrange(16, 64)})
        gateway.signal(signal.SIGHUP)

    async def restart_gateway(self) -> None:
        gateway = self._random.choice(self._gateways)
        num_before = len(gateway.events("gateway_started"))
        gateway.signal(signal.SIGTERM)
        assert await gateway.wait_ended() == 0
        gateway.start()
        await gateway.wait_for(lambda: len(gateway.events("gateway_started")) > num_before)

    async def freeze_redis(self) -> None:
        self._redis.pause()
        await asyncio.sleep(3)
        self._redis.resume()

    async def empty_redis(self) -> None:
        self._redis.ask("FLUSHALL")


async def _is_healed(gateways: list[GatewayProcess]) -> bool:
    async with httpx.AsyncClient(timeout=20) as client:
        for gateway in gateways:
            url = f"http://127.0.0.1:{gateway.sections['admin']['port']}/admin/v1/backends"
            backends = (await client.get(url)).json()["backends"]
            if [backend["state"] for backend in backends] != ["ready"] * 6:
                return False
            metrics = (await client.get(f"{gateway.base_url}/metrics")).text
            if "homing_requests_in_flight 0.0" not in metrics:
                return False
    return True


def _report(tally: Tally, chaos: Chaos) -> None:
    print(f"\nseed {SEED}, {sum(tally.ends.values())} requests, longest {tally.longest_s:.1f} s")
    for name, counter in (("faults", chaos.done), ("ends", tally.ends)):
        print(f"{name}: " + ", ".join(f"{key} {count}" for key, count in counter.most_common()))
    hits = [is_hit for _, is_hit in tally.homes]
    print(f"later turns at home: {sum(hits) / max(1, len(hits)):.3f} of {len(hits)}")


@pytest.mark.soak
@pytest.mark.timeout(DURATION_S + 300)
async def test_three_gateways_in_a_storm(tmp_path: Path) -> None:
    """See above."""
    require_redis_server()
    engines = [Engine(number) for number in range(6)]
    try:
        with redis_server(tmp_path) as redis:
            await _storm(tmp_path, engines, redis)
    finally:
        for engine in engines:
            engine.process.kill()
            engine.process.wait()


async def _storm(folder: Path, engines: list[Engine], redis: RedisProcess) -> None:
    backends = [
        {"id": engine.name, "url": f"http://127.0.0.1:{engine.port}", "engine": "vllm"} for engine in engines
    ]
    options: dict[str, Any] = {
        "backends": backends,
        "sessions": {"store": "redis", "redis": {"url": redis.url}},
        "failover": {"budget_min": 1000},
        "log": {"access": True},
        "leaving_notice_s": 0.5,
    }
    async with contextlib.AsyncExitStack() as stack:
        gateways = []
        for number in range(3):
            place = folder / f"g{number}"
            place.mkdir()
            ports = {"listen": {"port": free_port()}, "admin": {"port": free_port()}}
            environ = {"HOMING_KEY_SECRET": "of the chaos run"}
            gateways.append(
                await stack.enter_async_context(GatewayProcess(place, environ=environ, **ports, **options))
            )
        tally, chaos = Tally(), Chaos(gateways, engines, redis)
        until_s = time.monotonic() + DURATION_S
        agents = [Agent(gateways, tally, SEED * 1000 + number) for number in range(NUM_AGENTS)]
        async with asyncio.TaskGroup() as group:
            group.create_task(chaos.run(until_s))
            for agent in agents:
                group.create_task(agent.run(until_s))
        _report(tally, chaos)
        async with asyncio.timeout(HEALING_S):
            while not await _is_healed(gateways):
                await asyncio.sleep(0.2)
        assert tally.wrong == []
        assert tally.longest_s < LONGEST_S
        _compare_counts(gateways, tally)


def _compare_counts(gateways: list[GatewayProcess], tally: Tally) -> None:
    """The access lines of all lives tell what the clients saw."""
    lines = [line for gateway in gateways for line in gateway.events("request") if line["api"] == "chat"]
    outcomes = collections.Counter(line["outcome"] for line in lines)
    print("outcomes: " + ", ".join(f"{key} {count}" for key, count in outcomes.most_common()))
    num_left = tally.ends["left"] + tally.ends["cut off with the gateway"]
    assert tally.ends["complete"] <= outcomes["complete"] <= tally.ends["complete"] + num_left
    num_in_band = sum(count for end, count in tally.ends.items() if end.startswith("in band"))
    assert num_in_band - num_left <= outcomes["failed_in_stream"] <= num_in_band + num_left
    for gateway in gateways:
        assert not [line for line in gateway.log_lines() if b"Traceback" in line]
