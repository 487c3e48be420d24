"""Saturation on the wire: who waits, who comes first, who is refused; what a backend's Retry-After does."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fakes import backend as fake
from fakes.gateway_world import GatewayWorld

from gateway.values import BackendId


def gated(gate: asyncio.Event) -> fake.Behaviour:
    """Answer when the gate opens."""

    async def behave(turn: fake.Turn) -> None:
        await gate.wait()
        await fake.openai_answer()(turn)

    return behave


@contextlib.asynccontextmanager
async def saturated(
    num_backends: int = 1, **limits: Any
) -> AsyncIterator[tuple[GatewayWorld, asyncio.Event]]:
    """A gateway whose backends answer only when the event is set."""
    async with GatewayWorld(num_backends=num_backends, limits=limits) as world:
        gate = asyncio.Event()
        for backend in world.backends:
            backend.default = gated(gate)
        try:
            yield world, gate
        finally:
            gate.set()


def start(world: GatewayWorld, session: str | None, **fields: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.ensure_future(world.chat(session, **fields))


async def until_waiting(world: GatewayWorld, number: int) -> None:
    await world.wait_for(lambda: world.gateway.admission.room.num_waiting == number)


async def until_served(world: GatewayWorld, number: int) -> None:
    await world.wait_for(lambda: sum(world.served().values()) == number)


def texts(world: GatewayWorld, backend: int = 0) -> list[Any]:
    """What the backend was asked, in order."""
    return [request.json["messages"][-1]["content"] for request in world.backends[backend].requests]


async def test_a_full_gateway_serves_follow_ups_first_and_each_kind_in_order() -> None:
    """One place; two new sessions wait, then two follow-up turns come: these are served first."""
    follow_up = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
    ]
    async with saturated(max_in_flight=1, queue_size=10) as (world, gate):
        tasks = [start(world, "first", text="first")]
        await until_served(world, 1)
        for number, text in enumerate(("new 1", "new 2"), start=1):
            tasks.append(start(world, text, text=text))
            await until_waiting(world, number)
        for number, text in enumerate(("next 1", "next 2"), start=3):
            tasks.append(start(world, text, messages=[*follow_up, {"role": "user", "content": text}]))
            await until_waiting(world, number)
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 5
        assert texts(world) == ["first", "next 1", "next 2", "new 1", "new 2"]
        world.assert_idle()


async def test_without_a_queue_the_limit_refuses_at_once() -> None:
    """503 in the caller's dialect, with Retry-After; the place that is taken is served."""
    async with saturated(max_in_flight=1, queue_size=0) as (world, gate):
        running = start(world, "a")
        await until_served(world, 1)
        refused = await world.chat("b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert (
            refused.headers["x-homing-error-source"] == "internal"
        )  # the gateway's limit, no backend's fault
        assert int(refused.headers["retry-after"]) >= 1
        gate.set()
        assert (await running).status_code == 200
        assert world.gateway.admission.room.rejections == {"in_flight": 1}


async def test_a_wait_beyond_the_deadline_ends_with_503() -> None:
    """The client is told to come again, and nothing is left waiting."""
    async with saturated(max_in_flight=1, queue_size=5, queue_timeout_s=0.02) as (world, _):
        running = start(world, "a")
        await until_served(world, 1)
        refused = await world.client.post(
            "/v1/messages",
            json={"model": "fake-model", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
        )
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "overloaded_error")
        assert "retry-after" in refused.headers
        assert world.gateway.admission.room.num_waiting == 0
        assert not running.done()
        running.cancel()


@pytest.mark.parametrize("limit", ["max_in_flight", "max_in_flight_per_backend"])
async def test_a_client_that_leaves_the_queue_frees_its_place_at_once(limit: str) -> None:
    """Nothing of it remains, its request never reaches a backend, and the next in line is served."""
    async with saturated(**{limit: 1}) as (world, gate):
        running = start(world, "a", text="a")
        await until_served(world, 1)
        leaver, patient = start(world, "b", text="b"), start(world, "c", text="c")
        await until_waiting(world, 2)
        leaver.cancel()
        await until_waiting(world, 1)
        gate.set()
        assert [(await task).status_code for task in (running, patient)] == [200, 200]
        assert texts(world) == ["a", "c"]
        await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 0)
        world.assert_idle()
        assert world.gateway.admission.avoided(0.0) == frozenset()


async def test_a_bound_turn_waits_for_its_full_home_and_new_sessions_go_elsewhere() -> None:
    """Per-backend limit: the home keeps its session, though another backend has room."""
    async with saturated(num_backends=2, max_in_flight_per_backend=1) as (world, gate):
        gate.set()
        home = int((await world.chat("alice")).headers["x-homing-backend"][1:])
        gate.clear()
        blocker = start(world, "alice", text="blocker")
        await until_served(world, 2)
        turn = start(world, "alice", text="turn")
        await until_waiting(world, 1)
        newcomer = start(world, "bob", text="newcomer")
        await until_served(world, 3)
        assert texts(world, 1 - home) == ["newcomer"]
        gate.set()
        answers = await asyncio.gather(blocker, turn, newcomer)
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert answers[1].headers["x-homing-affinity"] == "hit"
        assert answers[2].headers["x-homing-affinity"] == "new"
        assert texts(world, home)[1:] == ["blocker", "turn"]
        world.assert_idle()


async def test_a_full_fleet_makes_new_sessions_wait() -> None:
    """With every backend at its limit a newcomer waits instead of overloading one."""
    async with saturated(num_backends=2, max_in_flight_per_backend=1) as (world, gate):
        running = [start(world, "a"), start(world, "b")]
        await until_served(world, 2)
        assert world.served() == {0: 1, 1: 1}
        waiter = start(world, "c")
        await until_waiting(world, 1)
        gate.set()
        assert [(await task).status_code for task in (*running, waiter)] == [200, 200, 200]
        world.assert_idle()


async def test_a_backend_that_asks_for_rest_gets_no_new_sessions() -> None:
    """503 with Retry-After: new sessions go elsewhere until then, and it is not taken for sick."""
    busy = fake.respond(b"{}", status=503, headers=(("retry-after", "30"),))
    async with GatewayWorld(num_backends=2) as world:
        world.backends[0].script(busy)
        world.backends[1].script(busy)
        first = await world.chat("first")
        assert first.status_code == 503  # both asked for rest; the last answer is passed on
        assert first.headers["retry-after"] == "30"
        assert world.gateway.admission.avoided(time.monotonic()) == {"b0", "b1"}
        world.gateway.admission.cooldowns.note(BackendId("b1"), 0.0, 0.0)
        before = world.served()[0]
        answers = [await world.chat(f"s{number}") for number in range(12)]
        assert {answer.headers["x-homing-backend"] for answer in answers} == {"b1"}
        assert {answer.headers["x-homing-affinity"] for answer in answers} == {"new"}
        assert world.served()[0] == before
        assert world.state(0) == "ready"
