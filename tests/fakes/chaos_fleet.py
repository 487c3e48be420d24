"""The processes of the chaos run, what is done to them, and what was seen of them meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from fakes.chaos_plan import NUM_ENGINES, NUM_GATEWAYS, Fault
from fakes.redis_server import RedisProcess, free_port, redis_server

from gateway.commands.up import Child

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 60.0
ORDER_LIMIT_S = 20.0
"""Longest time until all gateways show an order, from the moment that Redis answers again."""
MAX_ATTEMPTS = 3
_METRIC = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(slots=True)
class Span:
    """A time in which one process was in trouble. Wall seconds."""

    kind: str
    target: int
    began_s: float
    ended_s: float = float("inf")

    def overlaps(self, from_s: float, to_s: float) -> bool:
        return self.began_s <= to_s and from_s <= self.ended_s


@dataclass(slots=True)
class Gateway:
    """One gateway, over all lives of its process."""

    number: int
    child: Child
    url: str
    admin_url: str
    config_path: Path
    config: dict[str, Any]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it restarts or reloads."""
    is_taken: bool = True
    """Whether the balancer sends it new requests."""

    def write_config(self) -> None:
        draft = self.config_path.with_suffix(".draft")
        draft.write_text(yaml.safe_dump(self.config))
        draft.replace(self.config_path)

    def log(self) -> list[dict[str, Any]]:
        """All lines of all lives. A line that is no JSON becomes an event `not_json`."""
        entries = []
        for line in self.child.log_path.read_text(errors="replace").splitlines():
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:
                entries.append({"event": "not_json", "line": line})
        return entries

    def num_reloads(self) -> int:
        return self.child.log_path.read_bytes().count(b'"config_reloaded"')


class ChaosFleet:
    """Six engines, three gateways, one Redis."""

    def __init__(self, folder: Path, redis: RedisProcess) -> None:
        self.redis = redis
        ports = _distinct_ports(NUM_ENGINES + 2 * NUM_GATEWAYS, {redis.port})
        self._ports = ports[:NUM_ENGINES]
        self.engines = [self._engine(number, folder) for number in range(NUM_ENGINES)]
        self.gateways = [
            self._gateway(number, folder, *ports[NUM_ENGINES + 2 * number :][:2])
            for number in range(NUM_GATEWAYS)
        ]
        self.spans: list[Span] = []
        self.ordered = {f"e{number}": "ready" for number in range(NUM_ENGINES)}
        """What operators want of each engine: `ready`, `draining` or `removed`."""
        self.violations: list[str] = []
        """What must not happen, in words."""
        self._site = asyncio.Lock()  # rolling restarts and faults of Redis, one at a time
        self._redis_well_since_s = 0.0
        self._http: aiohttp.ClientSession

    def _engine(self, number: int, folder: Path) -> Child:
        port = self._ports[number]
        return Child(
            name=f"e{number}",
            command=[sys.executable, str(ROOT / "tests" / "fakes" / "vllm_process.py"), str(port)],
            ready_url=f"http://127.0.0.1:{port}/health",
            log_path=folder / f"e{number}.log",
        )

    def _gateway(self, number: int, folder: Path, port: int, admin_port: int) -> Gateway:
        path = folder / f"g{number}.yaml"
        child = Child(
            name=f"g{number}",
            command=[sys.executable, "-m", "gateway.main", "gateway", "--config", str(path)],
            ready_url=f"http://127.0.0.1:{port}/readyz",
            log_path=folder / f"g{number}.log",
        )
        backends = [
            {"id": f"e{n}", "url": f"http://127.0.0.1:{engine_port}", "engine": "vllm"}
            for n, engine_port in enumerate(self._ports)
        ]
        config = {
            "listen": {"port": port},
            "admin": {"port": admin_port},
            "backends": backends,
            "sessions": {"store": "redis", "redis": {"url": self.redis.url}},
            "health": {"probe_interval_s": 1.0, "probe_timeout_s": 1.0, "max_down_s": 4.0},
            "upstream": {"first_byte_timeout_s": 6.0, "idle_timeout_s": 4.0},
            # a storm is no small share of the traffic: the budget must not explain any error here
            "failover": {"max_attempts": MAX_ATTEMPTS, "budget_ratio": 3.0, "budget_min": 1000},
            "drain_timeout_s": 30.0,
        }
        url, admin_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}/admin/v1"
        gateway = Gateway(number, child, url, admin_url, path, config)
        gateway.write_config()
        return gateway

    async def start(self) -> None:
        children = [*self.engines, *(gateway.child for gateway in self.gateways)]
        await asyncio.gather(*(child.start() for child in children))
        await asyncio.gather(*(child.wait_ready(START_LIMIT_S) for child in children))

    async def stop(self) -> None:
        for engine in self.engines:
            _signal(engine, signal.SIGCONT)
        await asyncio.gather(*(gateway.child.stop() for gateway in self.gateways))
        for engine in self.engines:
            _signal(engine, signal.SIGKILL)
            assert engine.process is not None
            await engine.process.wait()
        await self._http.close()

    # -- faults

    async def apply(self, fault: Fault, *, ends_by_s: float) -> None:
        """Begin a fault and end it. A drain that lasts beyond `ends_by_s` (of the loop's clock) stands."""
        may_stand = asyncio.get_running_loop().time() + fault.lasts_s > ends_by_s
        action: Callable[..., Any] = getattr(self, f"_{fault.kind}")
        try:
            await (action(fault, may_stand) if fault.kind == "drain" else action(fault))
        except Exception as error:
            self.violations.append(f"{fault}: {error!r}")

    @contextlib.contextmanager
    def _trouble(self, kind: str, target: int) -> Any:
        span = Span(kind, target, time.time())
        self.spans.append(span)
        try:
            yield
        finally:
            span.ended_s = time.time()

    async def _kill(self, fault: Fault) -> None:
        engine = self.engines[fault.target]
        with self._trouble("kill", fault.target):
            assert engine.process is not None
            engine.process.kill()
            await engine.process.wait()
            await asyncio.sleep(fault.lasts_s)
            await engine.start()
            await engine.wait_ready(START_LIMIT_S)

    async def _freeze(self, fault: Fault) -> None:
        with self._trouble("freeze", fault.target):
            _signal(self.engines[fault.target], signal.SIGSTOP)
            await asyncio.sleep(fault.lasts_s)
            _signal(self.engines[fault.target], signal.SIGCONT)

    async def _fail_before(self, fault: Fault) -> None:
        await self._fail(fault, "before")

    async def _fail_in_stream(self, fault: Fault) -> None:
        await self._fail(fault, "in_stream")

    async def _fail(self, fault: Fault, how: str) -> None:
        with self._trouble(f"fail_{how}", fault.target):
            order = {"how": how, "count": 6}
            url = self.engines[fault.target].ready_url.replace("/health", "/fail")
            async with self._http.post(url, json=order) as answer:
                answer.raise_for_status()
            await asyncio.sleep(2.0)
            async with self._http.post(url, json=order | {"count": 0}) as answer:
                answer.raise_for_status()

    async def _reload(self, fault: Fault) -> None:
        gateway = self.gateways[fault.target]
        async with gateway.lock:
            before = gateway.num_reloads()
            health, failover = gateway.config["health"], gateway.config["failover"]
            health["probe_interval_s"] = 1.9 - health["probe_interval_s"]  # 1.0 or 0.9
            failover["budget_min"] = 2001 - failover["budget_min"]
            gateway.write_config()
            _signal(gateway.child, signal.SIGHUP)
            async with asyncio.timeout(15):
                while gateway.num_reloads() == before:
                    await asyncio.sleep(0.05)

    async def _roll(self, fault: Fault) -> None:
        async with self._site:
            await self._until_redis_has_all()
            for gateway in self.gateways:
                async with gateway.lock:
                    with self._trouble("roll", gateway.number):
                        await _restart(gateway)
                await asyncio.sleep(1.0)

    async def _redis_freeze(self, fault: Fault) -> None:
        async with self._site:
            with self._trouble("redis_freeze", 0):
                self._redis_well_since_s = float("inf")
                self.redis.pause()
                await asyncio.sleep(fault.lasts_s)
                self.redis.resume()
                self._redis_well_since_s = time.time()

    async def _redis_empty(self, fault: Fault) -> None:
        async with self._site:
            with self._trouble("redis_empty", 0):
                self._redis_well_since_s = float("inf")
                self.redis.kill()
                await asyncio.sleep(fault.lasts_s)
                await asyncio.to_thread(self.redis.start)
                self._redis_well_since_s = time.time()

    async def _until_redis_has_all(self) -> None:
        """An order that only one gateway has, because Redis was away, would end with that gateway."""
        while time.time() - self._redis_well_since_s < 5.0:
            await asyncio.sleep(0.2)

    # -- orders

    async def _drain(self, fault: Fault, may_stand: bool) -> None:
        name = f"e{fault.target}"
        with self._trouble("drain", fault.target):
            await self._ask_admin(fault.through, "POST", f"/backends/{name}/drain")
            self.ordered[name] = "draining"
            await asyncio.sleep(fault.lasts_s)
            if not may_stand:
                await self._check_and_take_back(fault)

    async def _remove(self, fault: Fault) -> None:
        name = f"e{fault.target}"
        with self._trouble("remove", fault.target):
            await self._ask_admin(fault.through, "DELETE", f"/backends/{name}")
            self.ordered[name] = "removed"
            await asyncio.sleep(fault.lasts_s)
            await self._check_and_take_back(fault)

    async def _check_and_take_back(self, fault: Fault) -> None:
        name = f"e{fault.target}"
        await self.until_as_ordered((name,))
        await self.take_back(fault.target, fault.through + 1)
        await self.until_as_ordered((name,))

    async def take_back(self, target: int, through: int) -> None:
        name = f"e{target}"
        if self.ordered[name] == "draining":
            await self._ask_admin(through, "POST", f"/backends/{name}/undrain")
        elif self.ordered[name] == "removed":
            spec = {"id": name, "url": f"http://127.0.0.1:{self._ports[target]}", "engine": "vllm"}
            await self._ask_admin(through, "POST", "/backends", json=spec)
        self.ordered[name] = "ready"

    async def _ask_admin(self, number: int, method: str, path: str, **options: Any) -> None:
        """Ask this gateway, or the next one while it restarts."""
        for turn in range(NUM_GATEWAYS * 20):
            gateway = self.gateways[(number + turn) % NUM_GATEWAYS]
            if gateway.lock.locked() and not gateway.is_taken:
                await asyncio.sleep(0.1)
                continue
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with self._http.request(method, gateway.admin_url + path, **options) as answer:
                    if answer.status in (200, 201, 202, 204):
                        return
                    raise AssertionError(f"{method} {path} at g{gateway.number}: {await answer.text()}")
            await asyncio.sleep(0.1)
        raise AssertionError(f"no gateway took {method} {path}")

    async def states(self, gateway: Gateway) -> dict[str, str]:
        async with self._http.get(f"{gateway.admin_url}/backends") as answer:
            return {one["id"]: one["state"] for one in (await answer.json())["backends"]}

    async def until_as_ordered(self, names: tuple[str, ...] = (), limit_s: float = ORDER_LIMIT_S) -> None:
        """Wait until all gateways show these engines (all of them) as ordered. Raises AssertionError."""
        names = names or tuple(self.ordered)
        deadline_s = time.time() + limit_s
        while odd := await self._not_as_ordered(names):
            if self._redis_well_since_s == float("inf"):
                deadline_s = time.time() + limit_s
            elif time.time() > deadline_s:
                raise AssertionError(f"{odd}, ordered: {self.ordered}")
            await asyncio.sleep(0.2)

    async def _not_as_ordered(self, names: tuple[str, ...]) -> list[str]:
        odd = []
        for gateway in self.gateways:
            try:
                states = await self.states(gateway)
            except aiohttp.ClientError:
                odd.append(f"g{gateway.number} does not answer")
                continue
            seen = {name: states.get(name, "removed") for name in names}
            odd += [
                f"g{gateway.number}: {name} is {state}"
                for name, state in seen.items()
                if state != self.ordered[name]
            ]
        return odd

    # -- observations

    async def metrics(self, gateway: Gateway, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The samples of one metric, by their labels."""
        async with self._http.get(f"{gateway.url}/metrics") as answer:
            text = await answer.text()
        return {
            tuple(_LABEL.findall(found["labels"] or "")): float(found["value"])
            for found in _METRIC.finditer(text)
            if found["name"] == name
        }

    def was_in(self, kind: str, target: int, from_s: float, to_s: float) -> bool:
        """Whether this trouble was there at some moment of that time. Wall seconds."""
        return any(
            span.kind == kind and span.target == target and span.overlaps(from_s, to_s) for span in self.spans
        )

    def well_engines(self, from_s: float, to_s: float) -> set[str]:
        """Those that had no trouble in all that time."""
        kinds = ("roll", "redis_freeze", "redis_empty")
        sick = {s.target for s in self.spans if s.kind not in kinds and s.overlaps(from_s, to_s)}
        return {f"e{number}" for number in range(NUM_ENGINES) if number not in sick}


async def _restart(gateway: Gateway) -> None:
    """SIGTERM, and all the time it wants. The balancer takes it again once it says that it is ready."""
    process = gateway.child.process
    assert process is not None
    process.terminate()
    try:
        async with asyncio.timeout(START_LIMIT_S):
            status = await process.wait()
        assert status == 0, f"g{gateway.number} ended with {status}: {gateway.child.last_words()}"
    finally:
        gateway.is_taken = False
    await gateway.child.start()
    await gateway.child.wait_ready(START_LIMIT_S)
    gateway.is_taken = True


def _distinct_ports(number: int, taken: set[int]) -> list[int]:
    """`free_port` may name a port twice, as long as nobody listens there."""
    ports: set[int] = set()
    while len(ports) < number:
        ports |= {free_port()} - taken
    return sorted(ports)


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process is not None and child.process.returncode is None:
        os.kill(child.process.pid, number)


@contextlib.asynccontextmanager
async def chaos_fleet(folder: Path) -> AsyncIterator[ChaosFleet]:
    """All of it, started; each gateway knows all engines."""
    with redis_server(folder / "redis") as redis:
        fleet = ChaosFleet(folder, redis)
        fleet._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=15))
        try:
            await fleet.start()
            await fleet.until_as_ordered()
            yield fleet
        finally:
            await fleet.stop()
