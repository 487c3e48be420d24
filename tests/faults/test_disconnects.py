"""Clients that leave at any moment, and all faults at once: afterwards nothing is counted or held."""

from __future__ import annotations

import asyncio
import random

from fakes.backend import STREAM_HEAD, Behaviour, Turn, hang, raw, reset, respond, stream
from fakes.gateway_world import FAST_HEALTH, GatewayWorld
from fakes.leaks import LeakCheck
from fakes.raw_client import RawClient, post

EVENTS = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number for number in range(5)]
NEVER_EJECT = {**FAST_HEALTH, "unhealthy_after": 1_000_000}


def chat_request(session: str, *, stream: bool) -> bytes:
    flag = b"true" if stream else b"false"
    body = b'{"model":"fake-model","stream":%b,"messages":[{"role":"user","content":"hi"}]}' % flag
    return post("/v1/chat/completions", body, f"x-session-id: {session}")


def slow_stream(num_turns: int) -> Behaviour:
    """Events with `num_turns` turns of the event loop between them."""

    async def behave(turn: Turn) -> None:
        await turn.send(STREAM_HEAD)
        for event in EVENTS:
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await turn.send(b"%x\r\n%b\r\n" % (len(event), event))
        await turn.send(b"0\r\n\r\n")

    return behave


async def leave_after(world: GatewayWorld, request: bytes, num_turns: int, how: str, num_sent: int) -> None:
    """Send `num_sent` bytes of a request, let the loop turn, then leave in the given way."""
    async with RawClient(world.gateway.port) as client:
        client.writer.write(request[:num_sent])
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if how == "reset":
            client.reset()
        elif how == "half-close":
            client.half_close()


async def test_a_thousand_random_disconnects() -> None:
    """1,000 clients leave after a random number of loop turns, in the middle of anything: every gauge is
    zero, every connection is idle or closed, no task remains, and the next request is served."""
    rng = random.Random(20)
    async with GatewayWorld(3, health=NEVER_EJECT) as world:
        leaks = LeakCheck(world)
        for backend in world.backends:
            backend.default = slow_stream(3)
        for _ in range(50):
            clients = []
            for _ in range(20):
                request = chat_request(f"s{rng.randrange(30)}", stream=True)
                num_sent = len(request) if rng.random() < 0.9 else rng.randrange(len(request))
                how = rng.choice(["reset", "close", "half-close"])
                clients.append(leave_after(world, request, rng.randrange(120), how, num_sent))
            await asyncio.gather(*clients)
        await leaks.check()
        assert all(world.state(number) == "ready" for number in range(3))
        for backend in world.backends:
            backend.default = respond(b"{}")
        assert (await world.chat("s1")).status_code == 200


async def test_cancel_in_each_phase_stops_the_engine() -> None:
    """Leaving while the body is read, while the engine is silent, and mid-stream: no engine goes on."""
    async with GatewayWorld(1, health=NEVER_EJECT) as world:
        leaks = LeakCheck(world)
        backend = world.backends[0]
        request = chat_request("s", stream=True)
        await leave_after(world, request, 50, "close", len(request) - 5)
        assert backend.requests == []
        for number, behaviour in enumerate((hang(), stream(then="wait"), stream(EVENTS[0], then="wait")), 1):
            backend.script(behaviour)
            async with RawClient(world.gateway.port) as client:
                await client.send(request)
                await backend.wait_until(lambda b, n=number: len(b.requests) == n)  # type: ignore[misc]  # bound early
            await backend.wait_until(lambda b, n=number: b.num_cancelled == n, timeout_s=1)  # type: ignore[misc]  # bound early
        await leaks.check()


async def test_storm_of_faults_and_a_flapping_backend_leaves_gauges_at_zero() -> None:
    """B27: refused, cut and cancelled requests while a backend is removed and added again: gauges are never
    negative and end at exactly zero."""
    rng = random.Random(27)
    async with GatewayWorld(3, health=NEVER_EJECT) as world:
        leaks = LeakCheck(world)
        router, fleet = world.gateway.router, world.gateway.fleet
        behaviours = [
            reset(),
            stream(EVENTS[0], then="reset"),
            slow_stream(2),
            respond(b"{}"),
            raw(b"x", "close"),
        ]
        lowest = 0

        async def one(number: int) -> None:
            request = chat_request(f"s{number % 40}", stream=bool(number % 2))
            async with RawClient(world.gateway.port) as client:
                await client.send(request)
                if number % 3 == 0:
                    for _ in range(rng.randrange(60)):
                        await asyncio.sleep(0)
                    client.reset()
                else:
                    await client.read_response()

        for _ in range(15):
            for backend in world.backends:
                backend.script(*(rng.choice(behaviours) for _ in range(10)))
            waiting = [asyncio.create_task(one(number)) for number in range(40)]
            flapping = fleet.view.backends[next(iter(fleet.view.backends))]
            fleet.remove(flapping.backend_id)
            await asyncio.sleep(0)
            fleet.add(flapping)
            await asyncio.gather(*waiting)
            lowest = min([lowest, *(router.in_flight(backend_id) for backend_id in fleet.view.backends)])
        assert lowest == 0
        for backend in world.backends:
            backend._script.clear()
        await leaks.check()
