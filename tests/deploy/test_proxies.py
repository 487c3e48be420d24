"""HAProxy and nginx as shipped in `deploy/proxies`, in front of two whole gateways.

What a proxy can spoil is looked at on the wire: events held back, header names dropped, heads and bodies
refused, a client's leaving hidden, a request repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import fakes.backend as fake
import httpx
import pytest
from fakes.front_proxy import haproxy, nginx
from fakes.gateway_world import GatewayWorld
from fakes.redis_server import free_port

EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
StartProxy = Callable[[int, tuple[int, int], Path], AbstractContextManager[str]]


@dataclass(frozen=True, slots=True)
class Site:
    """Two gateways with two backends, and a client that sees only the proxy."""

    world: GatewayWorld
    client: httpx.AsyncClient

    async def chat(self, text: str = "hi", **headers: str) -> httpx.Response:
        body = {"model": "fake-model", "messages": [{"role": "user", "content": text}]}
        named = {name.replace("__", "-"): value for name, value in headers.items()}
        return await self.client.post("/v1/chat/completions", json=body, headers=named)


@pytest.fixture(params=[haproxy, nginx])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    start: StartProxy = request.param
    async with GatewayWorld(num_backends=2, num_gateways=2) as world:
        ports = (world.gateways[0].port, world.gateways[1].port)
        with await asyncio.to_thread(_enter, start(free_port(), ports, tmp_path)) as url:
            async with httpx.AsyncClient(base_url=url, timeout=20) as client:
                await _until_served(client)
                yield Site(world, client)


def _enter(manager: AbstractContextManager[str]) -> AbstractContextManager[str]:
    """Start it on a thread, so that the gateways can answer the proxy's checks meanwhile."""
    url = manager.__enter__()

    @contextlib.contextmanager
    def entered() -> Iterator[str]:
        try:
            yield url
        finally:
            manager.__exit__(None, None, None)

    return entered()


async def _until_served(client: httpx.AsyncClient) -> None:
    """HAProxy has looked at a gateway, and found it ready."""
    async with asyncio.timeout(20):
        while (await client.get("/readyz?min_backends=1")).status_code != 200:
            await asyncio.sleep(0.02)


async def test_events_pass_one_by_one(site: Site) -> None:
    """The first event is with the client while the second is still unmade."""
    gate = asyncio.Event()
    for backend in site.world.backends:
        backend.default = fake.stream(EVENT, b"data: [DONE]\n\n", gates={1: gate})
    body = {"model": "fake-model", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    async with site.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        pieces = answer.aiter_bytes()
        async with asyncio.timeout(10):
            first = await anext(pieces)
        assert first.startswith(b"data: {")
        assert b"[DONE]" not in first
        gate.set()
        rest = b"".join([piece async for piece in pieces])
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_session_headers_pass_whatever_their_spelling(site: Site) -> None:
    """With underscores, dashes and capitals: the gateway keys on them, on whichever replica they come."""
    for headers in ({"session_id": "s-1"}, {"X__Session__Id": "s-2"}, {"thread__id": "s-3"}):
        answers = [await site.chat(**headers) for _ in range(3)]
        assert {answer.headers["x-homing-key-source"] for answer in answers} == {"header"}
        assert len({answer.headers["x-homing-backend"] for answer in answers}) == 1


async def test_long_heads_and_bodies_pass(site: Site) -> None:
    """A 20 KB header field and 6 MB of conversation arrive as they were sent."""
    text = "x" * 6_000_000
    answer = await site.chat(text, x__note="n" * 20_000)
    assert answer.status_code == 200
    received = next(backend for backend in site.world.backends if backend.requests).requests[0]
    assert received.json["messages"] == [{"role": "user", "content": text}]


async def test_a_client_that_leaves_stops_the_engine(site: Site) -> None:
    """Through the proxy too, while the engine is still silent; nothing is sent a second time."""
    for backend in site.world.backends:
        backend.default = fake.Turn.wait_closed_by_peer
    running = asyncio.ensure_future(site.chat())
    await site.world.wait_for(lambda: bool(site.world.served()))
    running.cancel()
    await site.world.wait_for(lambda: sum(one.num_cancelled for one in site.world.backends) == 1)
    await site.world.wait_for(
        lambda: all(gateway.proxy.num_in_flight == 0 for gateway in site.world.gateways)
    )
    assert sum(site.world.served().values()) == 1


async def test_a_gateway_that_leaves_costs_no_request(site: Site) -> None:
    """One gateway stops in order while requests come: each of them is answered by the other."""
    stopping = asyncio.ensure_future(site.world.gateways[0].stop(drain_timeout_s=5))
    statuses: list[int] = []
    while not stopping.done() or len(statuses) < 30:
        statuses.append((await site.chat(x__session__id="alice")).status_code)
    await stopping
    assert set(statuses) == {200}


async def test_both_gateways_are_used(site: Site) -> None:
    """The load is spread over the replicas."""
    await asyncio.gather(*(site.chat(x__session__id=f"s{number}") for number in range(20)))
    totals = [sum(one.metrics.totals(one.metrics.affinity).values()) for one in site.world.gateways]
    assert min(totals) >= 4
