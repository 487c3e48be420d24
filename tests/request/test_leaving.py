"""Clients that leave at an awkward moment: their turn ends once, and nothing of it stays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from fakes.gateway_world import GatewayWorld

from gateway.downstream.request import ClientRequest
from gateway.errors import ShuttingDown
from gateway.request.turn import Turn
from gateway.values import Api
from gateway.wire.routes import Route


def a_turn(**request: Any) -> Turn:
    fields = {"on_gone": None, "answer": lambda *_: None, **request}
    return Turn(
        request=cast(ClientRequest, SimpleNamespace(**fields)),
        route=Route(api=Api.CHAT, path="/v1/chat/completions"),
        request_id="r",
        engine_request_id="r",
        started_s=0.0,
    )


async def nothing() -> None:
    """A wait that is over."""


async def test_a_client_may_leave_between_the_end_of_a_wait_and_the_news_of_it() -> None:
    """The task is done, and its callback has not run: it cannot end the turn any more."""
    async with GatewayWorld(1) as world:
        proxy, turn = world.gateway.proxy, a_turn()
        turn.task = asyncio.create_task(nothing())
        await turn.task
        world.gateway.in_flight.add(turn, proxy)
        proxy.leave(turn)
        assert proxy.num_in_flight == 0
        assert world.gateway.metrics.requests["chat", "499", "aborted_by_client"] == 1


async def test_a_turn_ends_once() -> None:
    """The drain deadline and the client's departure may meet."""
    answers: list[int] = []
    async with GatewayWorld(1) as world:
        proxy, turn = world.gateway.proxy, a_turn(answer=lambda status, *_: answers.append(status))
        world.gateway.in_flight.add(turn, proxy)
        proxy.end(turn, ShuttingDown("leaving", retry_after_s=1))
        proxy.leave(turn)
        world.assert_idle()
        assert answers == [503]
        assert sum(world.gateway.metrics.requests.values()) == 1
