"""Faults cost at most the request they hit: fail-over, cancellation, broken streams, gauges back to zero."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fakes import backend as fake
from fakes.gateway_world import FAST_HEALTH, GatewayWorld
from fakes.raw_client import RawClient

from gateway.fleet.model_list import ModelCard
from gateway.fleet.registry import Fleet
from gateway.request.proxy import Proxy
from gateway.sessions.memory import MemoryStore
from gateway.values import BackendId, Binding, SessionKey, StoreBudget

CHAT = "/v1/chat/completions"


def chat_bytes(session: str, *, stream: bool = False, half_close: bool = False) -> bytes:
    """One raw request, for tests that close sockets in odd ways."""
    body = {"model": "fake-model", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
    data = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-session-id: {session}\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def home_of(world: GatewayWorld, session: str) -> int:
    """Bind the session; return the number of its home."""
    return int((await world.chat(session)).headers["x-homing-backend"][1:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["refuse", "reset", "status_503", "status_502"])
async def test_a_dead_home_fails_over_once_and_for_all(kind: str, stream: bool) -> None:
    """B30: no client error; the session is bound to the survivor, and its next turn goes straight there."""
    async with GatewayWorld(num_backends=3) as world:
        home = await home_of(world, "alice")
        if kind == "refuse":
            await world.backends[home].stop()
        elif kind == "reset":
            world.backends[home].default = fake.reset()
        else:
            world.backends[home].default = fake.respond(b"{}", status=int(kind[-3:]))
        first = await world.chat("alice", stream=stream)
        assert (first.status_code, first.headers["x-homing-affinity"]) == (200, "failover")
        survivor = first.headers["x-homing-backend"]
        assert survivor != f"b{home}"
        second = await world.chat("alice", stream=stream)
        assert (second.headers["x-homing-affinity"], second.headers["x-homing-backend"]) == ("hit", survivor)
        world.assert_idle()


async def test_a_killed_backend_leaves_the_fleet_and_its_sessions_spread() -> None:
    """All its sessions are answered elsewhere, no client sees an error, and it is marked down."""
    async with GatewayWorld(num_backends=4) as world:
        homes = {f"s{number}": await home_of(world, f"s{number}") for number in range(40)}
        victim = homes["s0"]
        await world.backends[victim].stop()
        moved: dict[int, int] = {}
        for session, home in homes.items():
            answer = await world.chat(session)
            assert answer.status_code == 200
            now = int(answer.headers["x-homing-backend"][1:])
            if home != victim:
                assert now == home  # only the dead backend's sessions move
            else:
                moved[now] = moved.get(now, 0) + 1
        assert len(moved) > 1  # spread, not one more victim
        await world.wait_for(lambda: world.state(victim) == "down")
        world.assert_idle()


async def test_a_returned_backend_pulls_nobody_home() -> None:
    """After a restart its old sessions stay where they are; new ones may come."""
    async with GatewayWorld(num_backends=2) as world:
        home = await home_of(world, "alice")
        port = world.backends[home].port
        await world.backends[home].stop()
        moved_to = (await world.chat("alice")).headers["x-homing-backend"]
        assert moved_to != f"b{home}"
        await world.wait_for(lambda: world.state(home) == "down")
        world.backends[home].start_time_s = 2_000.0
        await world.backends[home].start(port)
        await world.wait_for(lambda: world.state(home) == "ready")
        answers = [await world.chat("alice") for _ in range(3)]
        assert {answer.headers["x-homing-backend"] for answer in answers} == {moved_to}
        assert {answer.headers["x-homing-affinity"] for answer in answers} == {"hit"}


async def test_a_restart_between_two_turns_is_noticed_by_its_epoch() -> None:
    """A home that came back with an empty cache is re-placed once, counted as `home_restarted`."""
    async with GatewayWorld(num_backends=2) as world:
        home = await home_of(world, "alice")
        world.backends[home].start_time_s = 9_000.0
        backend_id = BackendId(f"b{home}")
        await world.wait_for(lambda: world.gateway.fleet.view.backends[backend_id].epoch == 9_000)
        first, second = await world.chat("alice"), await world.chat("alice")
        assert first.headers["x-homing-affinity"] == "moved"
        assert first.headers["x-homing-reason"] == "home_restarted"
        assert second.headers["x-homing-affinity"] == "hit"


class SlowClaims(MemoryStore):
    """A store whose claims take as long as it takes for a backend to leave the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet

    async def claim(
        self,
        key: SessionKey,
        backend_id: BackendId,
        epoch: int,
        context_tokens: int = 0,
        budget: StoreBudget | None = None,
    ) -> Binding | None:
        if len(self._fleet.view.backends) > 1:
            self._fleet.remove(backend_id)
        return await super().claim(key, backend_id, epoch, context_tokens, budget)


async def test_a_backend_that_leaves_before_it_is_asked_costs_nothing() -> None:
    """Discovery or an operator may remove it while its session is being bound: another one answers."""
    async with GatewayWorld(num_backends=2) as world:
        parts = replace(world.gateway.proxy_parts, sessions=SlowClaims(world.gateway.fleet))
        world.gateway.front.take_over(Proxy(parts), world.gateway.config)
        answer = await world.chat("alice")
        assert (answer.status_code, answer.headers["x-homing-affinity"]) == (200, "failover")
        assert len(world.gateway.fleet.view.backends) == 1
        world.assert_idle()


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429, 500])
async def test_an_engine_error_reaches_the_client_unchanged(status: int) -> None:
    """B28: errors that another backend cannot cure are not retried, and 4xx never empty the fleet."""
    body = b'{"error": {"message": "engine says no"}}'
    async with GatewayWorld(num_backends=2) as world:
        for backend in world.backends:
            backend.default = fake.respond(body, status=status)
        answers = [await world.chat("alice") for _ in range(2)]
        assert [(one.status_code, one.content) for one in answers] == [(status, body)] * 2
        assert sum(world.served().values()) == 2
        assert [world.state(number) for number in range(2)] == ["ready", "ready"]


async def test_with_every_backend_failing_attempts_are_bounded() -> None:
    """B32: no more attempts than the cap, and the last failure is told."""
    async with GatewayWorld(num_backends=5, failover={"max_attempts": 3}) as world:
        for backend in world.backends:
            backend.default = fake.reset()
        answer = await world.chat("alice")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_reset")
        assert len(world.served()) == 3
        # each may have been sent a second time, on a fresh connection: the first one was kept alive by probes
        assert sum(world.served().values()) <= 6
        world.assert_idle()


@pytest.mark.parametrize("then", ["close", "reset"])
async def test_a_broken_stream_is_told_in_band(then: str) -> None:
    """B18, B19: an error event, no [DONE], no invented finish_reason, no retry after the first byte."""
    event = b'data: {"choices":[{"index":0,"delta":{"content":"Hel"}}]}\n\n'
    async with GatewayWorld(num_backends=2) as world:
        for backend in world.backends:
            backend.default = fake.stream(event, event, then=then)
        received = b""
        with pytest.raises(Exception, match=r"incomplete|closed"):  # noqa: PT012 - the bytes so far count
            body = {"model": "fake-model", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
            async with world.client.stream("POST", CHAT, json=body) as answer:
                async for piece in answer.aiter_raw():
                    received += piece
        events = [line for line in received.decode().split("\n\n") if line]
        assert events[:2] == [event.decode().strip()] * 2
        assert json.loads(events[2].removeprefix("data: "))["error"]["code"] == "upstream_truncated"
        assert b"[DONE]" not in received
        assert b"finish_reason" not in received
        assert sum(world.served().values()) == 1
        world.assert_idle()


async def test_streams_that_break_take_a_backend_out() -> None:
    """A good status is no success yet: an engine that dies in every stream goes, though /health answers."""
    event = b'data: {"choices":[{"index":0,"delta":{"content":"Hel"}}]}\n\n'
    health = {**FAST_HEALTH, "unhealthy_after": 3, "min_down_s": 30.0}
    async with GatewayWorld(num_backends=2, health=health) as world:
        home = await home_of(world, "alice")
        world.backends[home].default = fake.stream(event, then="close")
        for _ in range(3):
            assert world.state(home) == "ready"
            with pytest.raises(httpx.RemoteProtocolError):
                await world.chat("alice", stream=True)
        assert world.state(home) == "down"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_engine(stream: bool) -> None:
    """B24: while the engine is silent (prefill), closing the client closes the upstream, no retry follows."""
    async with GatewayWorld(num_backends=2) as world:
        for backend in world.backends:
            backend.default = fake.hang()
        reader, writer = await asyncio.open_connection("127.0.0.1", world.gateway.port)
        writer.write(chat_bytes("alice", stream=stream))
        await world.wait_for(lambda: sum(world.served().values()) == 1)
        writer.close()
        await world.wait_for(lambda: sum(backend.num_cancelled for backend in world.backends) == 1, 2.0)
        await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 0)
        assert sum(world.served().values()) == 1
        world.assert_idle()
        assert "homing_client_disconnects_total" in (await world.client.get("/metrics")).text
        assert reader.at_eof() or reader is not None


async def test_a_client_that_leaves_mid_stream_cancels_the_engine() -> None:
    """B24: after two events the client closes; the backend sees it before the third."""
    event = b'data: {"choices":[{"index":0,"delta":{"content":"Hel"}}]}\n\n'
    async with GatewayWorld(num_backends=1) as world:
        world.backends[0].default = fake.stream(event, event, then="wait")
        reader, writer = await asyncio.open_connection("127.0.0.1", world.gateway.port)
        writer.write(chat_bytes("alice", stream=True))
        await reader.readuntil(event[-6:])
        writer.close()
        await world.backends[0].wait_until(lambda backend: backend.num_cancelled == 1)
        await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 0)
        world.assert_idle()


async def test_a_half_closed_client_gets_its_answer() -> None:
    """B24: a client that only finished sending (FIN) and still reads is served."""
    gate = asyncio.Event()

    async def slow(turn: fake.Turn) -> None:
        await gate.wait()
        await fake.openai_answer()(turn)

    async with GatewayWorld(num_backends=1) as world:
        world.backends[0].default = slow
        reader, writer = await asyncio.open_connection("127.0.0.1", world.gateway.port)
        writer.write(chat_bytes("alice"))
        await world.wait_for(lambda: sum(world.served().values()) == 1)
        sock: socket.socket = writer.get_extra_info("socket")
        sock.shutdown(socket.SHUT_WR)
        await asyncio.sleep(
            0.1
        )  # let the gateway see the FIN and send its probes: there is nothing to wait on
        gate.set()
        answer = await reader.read()
        assert b"HTTP/1.1 200" in answer
        assert b"Hello" in answer
        writer.close()


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}}, (10.0, 0.0, None)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 8}}, (10.0, 8.0, None)),
        ({"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 99}}, (10.0, 10.0, None)),
        ({"prompt_tokens": 10, "prompt_tokens_details": None}, (0.0, 0.0, "cached_tokens")),
        ({"prompt_tokens": 10}, (0.0, 0.0, "cached_tokens")),
        (None, (0.0, 0.0, "usage")),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_hit_rate_counts_only_what_is_known(
    usage: dict[str, Any] | None, expected: tuple[float, float, str | None], stream: bool
) -> None:
    """B54: zero is zero, absent is unknown and counted apart, more than the prompt is capped."""
    content: dict[str, Any] = {
        "choices": [{"index": 0, "delta": {"content": "x"}, "message": {"content": "x"}}]
    }
    if usage is not None:
        content["usage"] = usage
    body = json.dumps(content).encode()
    async with GatewayWorld(num_backends=1) as world:
        answer = (
            fake.stream(b"data: " + body + b"\n\n", b"data: [DONE]\n\n") if stream else fake.respond(body)
        )
        world.backends[0].default = answer
        await world.chat("alice", stream=stream)
        metrics = world.gateway.metrics
        prompt_tokens, cached_tokens, unknown = expected
        assert metrics.value(metrics.prompt_tokens, "b0") == prompt_tokens
        assert metrics.value(metrics.cached_tokens, "b0") == cached_tokens
        assert metrics.totals(metrics.usage_unknown) == ({unknown: 1.0} if unknown else {})


async def test_models_are_the_union_of_the_reachable() -> None:
    """B34: one dead backend never breaks the list of models; with none ready it is 503."""
    async with GatewayWorld(num_backends=2) as world:
        world.backends[1].model = "other-model"
        world.gateway.fleet.observe_models(BackendId("b1"), [ModelCard(id="other-model")])
        listed = (await world.client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["fake-model", "other-model"]
        await world.backends[1].stop()
        await world.wait_for(lambda: world.state(1) == "down")
        listed = (await world.client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["fake-model"]
        await world.backends[0].stop()
        await world.wait_for(lambda: world.state(0) == "down")
        assert (await world.client.get("/v1/models")).status_code == 503
        ready = await world.client.get("/readyz")  # about the gateway: it answers, if only with errors
        assert (ready.status_code, ready.json()["backends_ready"]) == (200, 0)
        assert (await world.client.get("/readyz?min_backends=1")).status_code == 503
        assert (await world.client.get("/livez")).status_code == 200


async def test_a_broken_answer_looks_broken_to_an_http_1_0_client() -> None:
    """Its body ends with the connection, so only a reset tells that it is not whole."""
    async with GatewayWorld(1) as world, RawClient(world.gateway.port) as client:
        event = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
        world.backends[0].default = fake.stream(event, then="close")
        await client.send(chat_bytes("alice", stream=True).replace(b"HTTP/1.1", b"HTTP/1.0"))
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(10):
                await client.reader.read()
        world.assert_idle()
