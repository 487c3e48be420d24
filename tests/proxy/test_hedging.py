"""A second backend in reserve, for requests that any backend answers alike."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fakes import backend as fake
from fakes.gateway_world import GatewayWorld

ANSWER = fake.respond(b'{"object":"list","data":[]}')
BODY = {"model": "fake-model", "input": "x"}


@contextlib.asynccontextmanager
async def hedging(
    num_backends: int = 2, after_s: float = 0.02, **failover: Any
) -> AsyncIterator[GatewayWorld]:
    async with GatewayWorld(num_backends, failover={"hedge_after_s": after_s, **failover}) as world:
        for backend in world.backends:
            backend.default = ANSWER
        yield world


async def embed(world: GatewayWorld, path: str = "/v1/embeddings", **options: Any) -> httpx.Response:
    return await world.client.post(path, json=BODY, **options)


def hedges(world: GatewayWorld) -> float:
    return world.gateway.metrics.retries["hedged"]


def in_order(world: GatewayWorld, *behaviours: fake.Behaviour) -> list[int]:
    """The backend asked first behaves as the first of these, and so on; later ones answer.

    Returns the numbers of those asked, filled in as they are.
    """
    asked: list[int] = []

    def behaviour(number: int) -> fake.Behaviour:
        async def behave(turn: fake.Turn) -> None:
            asked.append(number)
            place = len(asked) - 1
            await (behaviours[place] if place < len(behaviours) else ANSWER)(turn)

        return behave

    for number, backend in enumerate(world.backends):
        backend.default = behaviour(number)
    return asked


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/tokenize", "/classify"])
async def test_a_silent_backend_is_helped_out_by_another(path: str) -> None:
    """The second answers, the first is aborted, all gauges are zero, and no backend is blamed."""
    async with hedging() as world:
        asked = in_order(world, fake.hang())
        answer = await embed(world, path)
        assert (answer.status_code, answer.headers["x-homing-backend"]) == (200, f"b{asked[1]}")
        await world.backends[asked[0]].wait_until(lambda backend: backend.num_cancelled == 1)
        assert hedges(world) == 1
        assert world.served() == {0: 1, 1: 1}
        world.assert_idle()
        assert {world.state(0), world.state(1)} == {"ready"}


async def test_a_quick_answer_asks_nobody_else() -> None:
    """The second is only asked after the time."""
    async with hedging(after_s=30.0) as world:
        assert (await embed(world)).status_code == 200
        assert sum(world.served().values()) == 1
        assert hedges(world) == 0


async def test_the_first_wins_if_it_answers_first() -> None:
    """Then the second is aborted."""
    gate = asyncio.Event()

    async def late(turn: fake.Turn) -> None:
        await gate.wait()
        await ANSWER(turn)

    async with hedging() as world:
        asked = in_order(world, late, fake.hang())
        task = asyncio.ensure_future(embed(world))
        await world.wait_for(lambda: len(asked) == 2)
        gate.set()
        answer = await task
        assert (answer.status_code, answer.headers["x-homing-backend"]) == (200, f"b{asked[0]}")
        await world.backends[asked[1]].wait_until(lambda backend: backend.num_cancelled == 1)
        world.assert_idle()


async def test_when_one_fails_the_other_is_waited_for() -> None:
    """A reset of the first while the second is under way costs nothing; of both, it is an error."""
    gate = asyncio.Event()

    async def late_reset(turn: fake.Turn) -> None:
        await gate.wait()
        turn.reset()

    async with hedging() as world:
        in_order(world, late_reset)
        task = asyncio.ensure_future(embed(world))
        await world.wait_for(lambda: sum(world.served().values()) == 2)
        gate.set()
        assert (await task).status_code == 200
        for backend in world.backends:
            backend.default = late_reset
        assert (await embed(world)).status_code == 502
        world.assert_idle()


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/v1/embeddings", {"x-session-id": "s"}), ("/v1/chat/completions", {}), ("/v1/completions", {})],
)
async def test_what_has_affinity_or_generates_is_never_hedged(path: str, headers: dict[str, str]) -> None:
    """It waits for its one backend."""
    gate = asyncio.Event()

    async def late(turn: fake.Turn) -> None:
        await gate.wait()
        await ANSWER(turn)

    async with hedging(after_s=0.01) as world:
        for backend in world.backends:
            backend.default = late
        body = {
            "model": "fake-model",
            "input": "x",
            "prompt": "x",
            "messages": [{"role": "user", "content": "x"}],
        }
        task = asyncio.ensure_future(world.client.post(path, json=body, headers=headers))
        await world.wait_for(lambda: sum(world.served().values()) == 1)
        await asyncio.sleep(0.05)  # five times the delay: nothing may come of it
        assert sum(world.served().values()) == 1
        gate.set()
        assert (await task).status_code == 200


async def test_hedges_are_taken_from_the_retry_budget() -> None:
    """A fleet that is slow as a whole is not asked for twice the work."""
    async with hedging(budget_min=1, budget_ratio=0.0) as world:
        for _ in range(2):
            in_order(world, fake.hang())
            with contextlib.suppress(httpx.TimeoutException):
                await embed(world, timeout=0.3)
        assert hedges(world) == 1


async def test_a_lonely_backend_is_waited_for() -> None:
    """Nobody else to ask is no failure."""
    gate = asyncio.Event()

    async def late(turn: fake.Turn) -> None:
        await gate.wait()
        await ANSWER(turn)

    async with hedging(num_backends=1, after_s=0.001) as world:
        world.backends[0].default = late
        task = asyncio.ensure_future(embed(world))
        await world.wait_for(lambda: bool(world.served()))
        gate.set()
        assert (await task).status_code == 200
        assert hedges(world) == 0


async def test_an_answer_of_the_second_that_breaks_is_the_seconds_fault() -> None:
    """Who broke off is blamed, not who was asked first; nothing is learnt of the first from it."""
    broken = fake.raw(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"object"', "close")
    async with hedging() as world:
        asked = in_order(world, fake.hang(), broken)
        with contextlib.suppress(httpx.RemoteProtocolError):
            await embed(world)
        errors = world.gateway.metrics.upstream_errors
        assert dict(errors) == {(f"b{asked[1]}", "upstream_truncated"): 1.0}
        world.assert_idle()


async def test_a_client_that_leaves_aborts_both() -> None:
    """Within the same moment, and nothing is left counted."""
    async with hedging() as world:
        for backend in world.backends:
            backend.default = fake.hang()
        task = asyncio.ensure_future(embed(world))
        await world.wait_for(lambda: sum(world.served().values()) == 2)
        task.cancel()
        for backend in world.backends:
            await backend.wait_until(lambda one: one.num_cancelled == 1)
        await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 0)
        world.assert_idle()
