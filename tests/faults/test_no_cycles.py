"""Requests leave no reference cycle: the collector, which stops every stream while it walks, has no work.

It is also the reason why it may be told to look rarely (`lifecycle`): a cycle would hold a request's body.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from fakes.backend import reset, respond, stream
from fakes.gateway_world import GatewayWorld

EVENT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
BEHAVIOURS = {
    "answered": respond(b'{"id":"c","choices":[]}'),
    "streamed": stream(EVENT, EVENT, b"data: [DONE]\n\n"),
    "broken off": stream(EVENT, then="close"),
    "refused by the backend": respond(status=400),
    "reset": reset(),
}


@pytest.fixture
def kept_garbage() -> Iterator[list[object]]:
    """What only the collector can free, from here on."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def of_the_gateway(garbage: list[object]) -> set[str]:
    """Kinds of our own objects that belong to one request."""
    gc.collect()
    return {
        type(one).__qualname__
        for one in garbage
        if type(one).__name__ in ("Turn", "AnswerObserver", "SseObserver", "ClientRelay", "Exchange")
    }


@pytest.mark.parametrize("name", BEHAVIOURS)
async def test_an_answer_leaves_no_cycle(name: str, kept_garbage: list[object]) -> None:
    """However the backend behaves, the request is gone when it is over."""
    async with GatewayWorld(1, failover={"max_attempts": 1}) as world:
        world.backends[0].default = BEHAVIOURS[name]
        for _ in range(3):
            try:
                await world.chat("s-1", stream=name in ("streamed", "broken off"))
            except Exception as error:
                error.__traceback__ = None  # the client's own
        assert of_the_gateway(kept_garbage) == set()


async def test_a_refusal_leaves_no_cycle(kept_garbage: list[object]) -> None:
    """An error knows where it was raised, and that place knows the error: the circle is opened."""
    async with GatewayWorld(1) as world:
        for _ in range(3):
            answer = await world.client.post("/v1/chat/completions", content=b"{nope")
            assert answer.status_code == 400
        assert of_the_gateway(kept_garbage) == set()
