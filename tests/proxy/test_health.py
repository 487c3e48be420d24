"""Health on the wire: answers that flow, back-pressure, the last backend, engines that fail now and then."""

from __future__ import annotations

import asyncio
import collections
from typing import Any

import httpx
import pytest
from fakes import backend as fake
from fakes.gateway_world import FAST_HEALTH, GatewayWorld
from fakes.redis_server import free_port

from gateway.config.config import parse_config
from gateway.fleet.registry import StateChange
from gateway.process.gateway import Gateway

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"Hel"}}]}\n\n'
HEALTH = {**FAST_HEALTH, "probe_interval_s": 0.1, "probe_timeout_s": 0.1}


def tell_changes(world: GatewayWorld) -> list[tuple[str, str]]:
    """Every change of state from now on, as (backend, state)."""
    changes: list[tuple[str, str]] = []

    def note(change: StateChange) -> None:
        changes.append((change.backend_id, change.after.value))

    world.gateway.fleet.add_change_observer(note)
    return changes


async def ready(world: GatewayWorld) -> dict[str, Any]:
    """What /readyz says; it must be 200."""
    answer = await world.client.get("/readyz")
    assert answer.status_code == 200
    told: dict[str, Any] = answer.json()
    return told


def trickle(until: asyncio.Event) -> fake.Behaviour:
    """An event every 20 ms until told to end."""

    async def behave(turn: fake.Turn) -> None:
        await turn.send(fake.STREAM_HEAD)
        while not until.is_set():
            await turn.send(fake.chunk(EVENT))
            await asyncio.sleep(0.02)
        await turn.send(fake.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    return behave


@pytest.mark.parametrize("num_backends", [1, 2])
async def test_a_health_page_that_hangs_beside_a_stream(num_backends: int) -> None:
    """G03: while tokens come it is neither down nor are its sessions moved, and nothing is even doubted."""
    health = {**HEALTH, "probe_interval_s": 0.4}  # and so a slow machine may hold the stream up for as long
    async with GatewayWorld(num_backends, health=health) as world:
        home = int((await world.chat("alice")).headers["x-homing-backend"][1:])
        changes, end = tell_changes(world), asyncio.Event()
        world.backends[home].script(trickle(end))
        stream = asyncio.create_task(world.chat("alice", stream=True))
        await asyncio.sleep(0.2)
        world.backends[home].health = fake.hang()
        await asyncio.sleep(1.5)  # no other answer comes meanwhile: the stream alone speaks for it
        assert await ready(world) == {
            "ready": True,
            "backends_ready": num_backends,
            "degraded": [],
            "reason": None,
        }
        for _ in range(20):
            answer = await world.chat("alice")
            assert (answer.status_code, answer.headers["x-homing-affinity"]) == (200, "hit")
        end.set()
        assert (await stream).text.endswith("[DONE]\n\n")
        assert not changes


async def test_silence_and_a_health_page_that_hangs() -> None:
    """With nothing that speaks for it the backend goes, if another is left; its next answer is its return."""
    async with GatewayWorld(2, health=HEALTH) as world:
        home = int((await world.chat("alice")).headers["x-homing-backend"][1:])
        gate = asyncio.Event()
        world.backends[home].script(fake.stream(EVENT, EVENT, b"data: [DONE]\n\n", gates={1: gate}))
        stream = asyncio.create_task(world.chat("alice", stream=True))
        world.backends[home].health = fake.hang()
        await world.wait_for(lambda: world.state(home) == "down")
        assert (await world.chat("alice")).headers["x-homing-affinity"] == "moved"
        gate.set()
        assert (await stream).status_code == 200
        await world.wait_for(lambda: world.state(home) == "ready")


async def test_a_head_without_a_body_is_no_answer_that_flows() -> None:
    """A health page that sends its head and then hangs does not speak for itself."""
    async with GatewayWorld(2, health=HEALTH) as world:
        world.backends[0].health = fake.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", then="wait")
        await world.wait_for(lambda: world.state(0) == "down")


@pytest.mark.parametrize("num_backends", [1, 3])
@pytest.mark.parametrize("health", [fake.respond(status=500), fake.hang(), fake.reset()])
async def test_probes_alone_do_not_end_service(health: fake.Behaviour, num_backends: int) -> None:
    """G03: idle backends whose health pages fail, all of them: every request is served, and it is told."""
    async with GatewayWorld(num_backends, health=HEALTH) as world:
        await asyncio.sleep(0.2)
        for backend in world.backends:
            backend.health = health
        fleet = world.gateway.fleet
        await world.wait_for(lambda: len(fleet.spared) == num_backends)
        told = await ready(world)
        assert (told["backends_ready"], told["degraded"]) == (num_backends, ["backend_health"])
        page = (await world.client.get("/metrics")).text
        assert f"homing_backends_spared {num_backends}.0" in page
        for number in range(20):
            assert (await world.chat(f"s{number}")).status_code == 200
        for backend in world.backends:
            backend.health = None
        await world.wait_for(lambda: not fleet.spared)
        assert (await ready(world))["degraded"] == []


async def test_the_last_backend_goes_when_nobody_listens() -> None:
    """Refused connections are the one thing that takes it out; it is back as soon as it listens."""
    async with GatewayWorld(1, health=HEALTH) as world:
        port = world.backends[0].port
        await world.backends[0].stop()
        await world.wait_for(lambda: world.state(0) == "down")
        refused = await world.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_backend_available")
        assert (await ready(world))["backends_ready"] == 0
        await world.backends[0].start(port)
        await world.wait_for(lambda: world.state(0) == "ready")


# -- back-pressure


FULL = fake.respond(b'{"detail":"queue is full"}', status=503)


async def test_a_saturated_lone_worker_is_never_down() -> None:
    """G06: 503 without Retry-After for as long as it likes; each client gets the engine's own words."""
    async with GatewayWorld(1, health=HEALTH) as world:
        changes = tell_changes(world)
        world.backends[0].default = FULL
        for _ in range(16):
            answers = await asyncio.gather(*(world.chat() for _ in range(8)))
            assert {(answer.status_code, answer.text) for answer in answers} == {
                (503, '{"detail":"queue is full"}')
            }
            await asyncio.sleep(0.05)
        assert not changes
        world.backends[0].default = fake.openai_answer()
        assert (await world.chat()).status_code == 200


async def test_a_queue_in_the_engine_explains_its_503() -> None:
    """One of two refuses for load: it keeps its place in the fleet, however often it refuses."""
    async with GatewayWorld(2, health=HEALTH) as world:
        for backend in world.backends:  # alike, or the other one would get all
            backend.more_metrics = "vllm:num_requests_running 4\nvllm:num_requests_waiting 9\n"
        await world.wait_for(
            lambda: all(map(world.gateway.fleet.has_queue, world.gateway.fleet.view.backends))
        )
        changes = tell_changes(world)
        world.backends[0].default = FULL
        for number in range(40):
            assert (await world.chat(f"s{number}")).status_code in (200, 503)  # retries have a budget
        assert world.served()[0] > 3
        assert not changes


# -- engines that fail


def fail_every_fourth() -> fake.Behaviour:
    count = 0

    async def behave(turn: fake.Turn) -> None:
        nonlocal count
        count += 1
        is_bad = count % 4 == 0
        await (fake.respond(b"{}", status=500) if is_bad else fake.openai_answer())(turn)

    return behave


async def test_an_engine_that_fails_a_quarter_loses_its_traffic() -> None:
    """C04: it goes though no two requests fail in a row, and is back by a trial once it is well."""
    health = {**HEALTH, "min_down_s": 0.2, "max_down_s": 0.5, "failure_share_window_s": 5.0}
    async with GatewayWorld(3, health=health) as world:
        changes = tell_changes(world)
        world.backends[0].default = fail_every_fourth()

        async def wave(number: int) -> collections.Counter[int]:
            answers = await asyncio.gather(*(world.chat(f"s{number}-{one}") for one in range(15)))
            await asyncio.sleep(0.02)
            return collections.Counter(answer.status_code for answer in answers)

        number = 0
        while ("b0", "down") not in changes:
            number += 1
            assert number < 60
            await wave(number)
        before = len(world.backends[0].requests)
        failed = sum([await wave(number + one) for one in range(1, 31)], collections.Counter())
        num_down = changes.count(("b0", "down"))
        assert len(world.backends[0].requests) - before < 100, "a third of 450 would be its share"
        assert failed[500] < 20, "of 450 requests, 37 would fail if it kept its share"
        assert num_down >= 1
        world.backends[0].default = fake.openai_answer()
        for one in range(200):
            await wave(1_000 + one)
            if world.state(0) == "ready":
                break
        assert world.state(0) == "ready"
        assert {name for name, _ in changes} == {"b0"}
        assert ("b0", "degraded") in changes, "by a trial"


@pytest.mark.parametrize("status", [500, 502])
async def test_a_broken_engine_costs_a_few_requests_at_each_return(status: int) -> None:
    """C04: good probes, and every request fails: three at most at each return, however many there are."""
    health = {**HEALTH, "min_down_s": 0.1, "max_down_s": 0.1}
    async with GatewayWorld(3, health=health) as world:
        changes = tell_changes(world)
        world.backends[0].default = fake.respond(b"{}", status=status)
        number = 0
        while ("b0", "down") not in changes:
            number += 1
            await world.chat(f"first-{number}")
        before = len(world.backends[0].requests)
        for wave in range(40):
            await asyncio.gather(*(world.chat(f"s{wave}-{one}") for one in range(20)))
            await asyncio.sleep(0.02)
        num_returns = changes.count(("b0", "degraded"))
        assert num_returns >= 3
        assert len(world.backends[0].requests) - before <= 3 * num_returns
        assert ("b0", "ready") not in changes
        world.assert_idle()


async def test_not_ready_while_nothing_is_known_of_any_backend() -> None:
    """A new replica waits for its first probes, and no longer: then it answers, if only with errors."""
    config = parse_config(
        {
            "listen": {"port": 0},
            "admin": {"is_enabled": False},
            "log": {"access": False, "level": "error"},
            "health": {**HEALTH, "probe_timeout_s": 0.2},
            "backends": [{"url": f"http://127.0.0.1:{free_port()}"}],
        }
    )
    gateway = Gateway(config)
    await gateway.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as client:
            async with asyncio.timeout(5):
                while (await client.get("/readyz")).status_code != 200:
                    await asyncio.sleep(0.02)
            gateway.front.is_leaving = True
            answer = await client.get("/readyz")
            assert (answer.status_code, answer.json()["reason"]) == (503, "leaving")
    finally:
        await gateway.stop(drain_timeout_s=0)


async def test_ready_can_be_asked_for_backends() -> None:
    """`min_backends` is for who waits for engines, and no other value confuses it."""
    async with GatewayWorld(2) as world:
        for query, status in (("1", 200), ("2", 200), ("3", 503), ("x", 200), ("-1", 200), ("9" * 30, 200)):
            answer: httpx.Response = await world.client.get("/readyz", params={"min_backends": query})
            assert answer.status_code == status
