"""What really happened decides: fail-over up to the first content, health, metrics, the client's answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.backend import (
    STREAM_HEAD,
    Behaviour,
    Turn,
    chunk,
    hang,
    openai_answer,
    raw,
    reset,
    respond,
    stream,
)
from fakes.dialects import CASE_IDS, CASES, DIALECTS, Dialect
from fakes.gateway_world import FAST_HEALTH, GatewayWorld
from fakes.raw_client import RawClient, post

from gateway.request.answer_observer import AnswerObserver

NEVER_EJECT = {**FAST_HEALTH, "unhealthy_after": 1_000_000, "failure_share_min_requests": 1_000_000}
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
ENGINE_DEAD = b'{"error":{"message":"EngineCore died","type":"InternalServerError","param":null,"code":500}}'
OPENINGS = {  # what engines send before they have computed anything
    "chat": [b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'],
    "completions": [b'data: {"id":"c","choices":[{"index":0,"text":""}]}\n\n'],
    "responses": [
        b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1"}}\n\n',
        b'event: response.in_progress\ndata: {"type":"response.in_progress","response":{"id":"resp_1"}}\n\n',
    ],
    "messages": [
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1"}}\n\n',
        b'event: ping\ndata: {"type":"ping"}\n\n',
    ],
    "generate": [b'data: {"text":"","meta_info":{"id":"g"}}\n\n'],
}
IN_BAND = {
    "messages": b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"dead"}}\n\n',
    "responses": b'event: error\ndata: {"type":"error","code":"server_error","message":"dead"}\n\n',
}


def opening(dialect: Dialect) -> bytes:
    return b"".join(chunk(event) for event in (b": waiting\n\n", *OPENINGS[dialect.name]))


def in_band(dialect: Dialect) -> bytes:
    return IN_BAND.get(dialect.name, b"data: " + ENGINE_DEAD + b"\n\n")


def faults(dialect: Dialect, *, is_stream: bool) -> Iterator[tuple[str, Behaviour]]:
    """Every fault that comes before any content."""
    yield "reset before the head", reset()
    yield "status 500 is no cure, 502 is", respond(b"bad gateway", status=502)
    if not is_stream:
        yield "cut before the body", raw(JSON_HEAD + b"content-length: 40\r\n\r\n", "reset")
        yield "error in a good answer", respond(ENGINE_DEAD)
        yield "error of an older engine", respond(b'{"object":"error","message":"died","code":500}')
        return
    head = STREAM_HEAD + opening(dialect)
    yield "reset after the head", raw(STREAM_HEAD, "reset")
    yield "closed after an opening", raw(head, "close")
    yield "reset after an opening", raw(head, "reset")
    yield "half of the first content", raw(head + b"20\r\ndata: {", "close")
    ending = chunk(in_band(dialect)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    yield "error event", raw(head + ending)
    yield "error event at once", raw(STREAM_HEAD + ending)
    yield "garbage in place of a chunk", raw(head + b"zz\r\n", "wait")


@pytest.mark.parametrize(("dialect", "is_stream"), CASES, ids=CASE_IDS)
async def test_a_fault_before_content_leaves_no_trace(dialect: Dialect, is_stream: bool) -> None:
    """Another backend answers, whole; the client sees `failover` and nothing of the first."""
    good = b'data: {"choices":[{"delta":{"content":"Hello"},"text":"Hello"}],"text":"Hello"}\n\n'
    async with GatewayWorld(2, health=NEVER_EJECT, failover={"budget_min": 1000}) as world:
        for name, fault in faults(dialect, is_stream=is_stream):
            seen: list[int] = []

            def behaviour(number: int, fault: Behaviour = fault, seen: list[int] = seen) -> Behaviour:
                async def behave(turn: Turn) -> None:
                    seen.append(number)
                    answer = stream(good) if is_stream else respond(b'{"good":1}')
                    await (fault if len(seen) == 1 else answer)(turn)

                return behave

            for number, backend in enumerate(world.backends):
                backend.default = behaviour(number)
            async with RawClient(world.gateway.port) as client:
                await client.send(post(dialect.path, dialect.encode(stream=is_stream)))
                answer = await client.read_response(timeout_s=5)
            assert (answer.status, answer.is_complete) == (200, True), (name, answer)
            assert answer.header("x-homing-affinity") == "failover", name
            assert answer.body == (good if is_stream else b'{"good":1}'), name
            assert len(seen) == 2, name
            assert seen[0] != seen[1], name
        outcomes = {labels[2] for labels in world.gateway.metrics.requests}
        assert outcomes == {"complete"}
        world.assert_idle()


@pytest.mark.parametrize("dialect", [one for one in DIALECTS if one.can_stream], ids=lambda one: one.name)
async def test_without_another_backend_the_engines_own_words_pass(dialect: Dialect) -> None:
    """Also where they are an error event in a good answer: nothing is added, and it counts as what it is."""
    async with GatewayWorld(1, health=NEVER_EJECT) as world:
        body = b"".join(OPENINGS[dialect.name]) + in_band(dialect)
        world.backends[0].script(stream(*OPENINGS[dialect.name], in_band(dialect)))
        async with RawClient(world.gateway.port) as client:
            await client.send(post(dialect.path, dialect.encode(stream=True)))
            answer = await client.read_response(timeout_s=5)
        assert (answer.status, answer.is_complete, answer.body) == (200, True, body)
        assert [labels[1:] for labels in world.gateway.metrics.requests] == [("200", "failed_before_content")]
        assert world.gateway.metrics.upstream_errors["b0", "in_band_error"] == 1


async def test_errors_about_the_request_are_passed_on_at_once() -> None:
    """A 4xx inside a good answer is no other backend's business, nor this one's fault."""
    refused = b'{"error":{"message":"too long","type":"BadRequestError","code":400}}'
    async with GatewayWorld(2) as world:
        for backend in world.backends:
            backend.script(stream(b"data: " + refused + b"\n\n"))
        answer = await world.chat(stream=True)
        assert (answer.status_code, answer.content) == (200, b"data: " + refused + b"\n\n")
        assert sum(world.served().values()) == 1
        assert list(world.gateway.metrics.requests) == [("chat", "200", "complete")]


@pytest.mark.parametrize("ending", ["reset", "in band", "aborted"])
async def test_a_failure_after_content_counts_as_what_it_is(ending: str) -> None:
    """In metrics, access line and health; the client has what came, and an error behind it."""
    token = b'data: {"choices":[{"index":0,"delta":{"content":"Hel"},"finish_reason":null}]}\n\n'
    abort = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n'
    behaviours = {
        "reset": raw(STREAM_HEAD + chunk(token), "reset"),
        "in band": stream(token, b"data: " + ENGINE_DEAD + b"\n\n"),
        "aborted": stream(token, abort, b"data: [DONE]\n\n"),
    }
    async with GatewayWorld(2, health={**FAST_HEALTH, "unhealthy_after": 3}) as world:
        for number in range(3):
            for backend in world.backends:
                backend.default = behaviours[ending]
            async with RawClient(world.gateway.port) as client:
                body = DIALECTS[0].encode(stream=True)
                await client.send(post("/v1/chat/completions", body, "x-session-id: s"))
                answer = await client.read_response(timeout_s=5)
            assert answer.body.startswith(token), number
        assert list(world.gateway.metrics.requests) == [("chat", "200", "failed_in_stream")]
        labels = {labels[1] for labels in world.gateway.metrics.upstream_errors}
        assert labels == {"upstream_truncated" if ending == "reset" else "in_band_error"}
        await world.wait_for(lambda: world.state(next(iter(world.served()))) != "ready")


async def test_an_answer_is_held_no_longer_than_told() -> None:
    """Then the client gets the head, and later the rest; a break is then told in band."""
    gate = asyncio.Event()

    async def slow(turn: Turn) -> None:
        await turn.send(STREAM_HEAD + opening(DIALECTS[0]))
        await gate.wait()
        turn.reset()

    async with GatewayWorld(2, failover={"hold_s": 0.05}) as world:
        for backend in world.backends:
            backend.script(slow)
        async with RawClient(world.gateway.port) as client:
            await client.send(post("/v1/chat/completions", DIALECTS[0].encode(stream=True)))
            assert (await client.read_head())[0] == 200
            gate.set()
            ending = await client.read_to_end(timeout_s=5)
        assert b"upstream_truncated" in ending
        assert sum(world.served().values()) == 1
        world.assert_idle()


async def test_nothing_is_held_when_it_is_switched_off() -> None:
    """The head goes as soon as it comes."""
    async with GatewayWorld(1, failover={"hold_s": 0}) as world:
        gate = asyncio.Event()
        world.backends[0].script(stream(*OPENINGS["chat"], gates={0: gate}))
        async with RawClient(world.gateway.port) as client:
            await client.send(post("/v1/chat/completions", DIALECTS[0].encode(stream=True)))
            assert (await client.read_head())[0] == 200
            gate.set()


async def test_a_client_that_leaves_while_its_answer_is_held() -> None:
    """The engine's work ends, and every gauge is at zero."""
    async with GatewayWorld(1) as world:
        world.backends[0].script(raw(STREAM_HEAD + opening(DIALECTS[0]), "wait"))
        async with RawClient(world.gateway.port) as client:
            await client.send(post("/v1/chat/completions", DIALECTS[0].encode(stream=True)))
            await world.wait_for(lambda: len(world.gateway.proxy._held) == 1)
        await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 0)
        assert len(world.gateway.proxy._held) == 0
        world.assert_idle()
        assert list(world.gateway.metrics.requests) == [("chat", "499", "aborted_by_client")]


async def test_prefill_is_bounded_by_the_first_byte_timeout() -> None:
    """A head that came early starts no shorter limit; the gaps between events have their own."""
    gate = asyncio.Event()

    async def slow(turn: Turn) -> None:
        await turn.send(STREAM_HEAD)
        await asyncio.sleep(0.6)
        await stream_rest(turn)

    async def stream_rest(turn: Turn) -> None:
        await turn.send(chunk(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'))
        await gate.wait()

    upstream = {"first_byte_timeout_s": 20, "idle_timeout_s": 0.2}
    async with GatewayWorld(1, upstream=upstream, health=NEVER_EJECT) as world:
        world.backends[0].script(slow)
        async with RawClient(world.gateway.port) as client:
            await client.send(post("/v1/chat/completions", DIALECTS[0].encode(stream=True)))
            assert (await client.read_head())[0] == 200
            assert b'"x"' in await client.read_chunk()
            assert b"upstream_timeout" in await client.read_to_end(timeout_s=10)
        gate.set()


async def test_alternatives_are_those_that_serve_the_model() -> None:
    """A full engine's own answer reaches the client when the only other one serves another model."""
    world = GatewayWorld(2)
    world.backends[1].model = "other"
    async with world:
        world.backends[0].script(respond(b'{"error":"full"}', status=503, headers=(("retry-after", "7"),)))
        answer = await world.chat()
        assert (answer.status_code, answer.content) == (503, b'{"error":"full"}')
        assert answer.headers["retry-after"] == "7"
        assert not world.gateway.metrics.retries


@pytest.mark.parametrize("order", ["drain", "cordon"])
async def test_a_retry_opens_nothing_that_an_operator_has_closed(order: str) -> None:
    """A new session whose first backend says 503 does not land on a closed one."""
    async with GatewayWorld(2) as world:
        await world.admin.post(f"/admin/v1/backends/b1/{order}")
        world.backends[0].script(respond(b'{"error":"full"}', status=503))
        answer = await world.chat("new")
        assert (answer.status_code, answer.content) == (503, b'{"error":"full"}')
        assert set(world.served()) == {0}


async def test_a_reset_connection_sends_the_request_elsewhere() -> None:
    """A backend that resets a used connection is not asked again while another one is there."""
    async with GatewayWorld(2, health=NEVER_EJECT) as world:
        home = int((await world.chat("s")).headers["x-homing-backend"].removeprefix("b"))
        world.backends[home].script(reset(), reset())
        answer = await world.chat("s")
        assert answer.headers["x-homing-backend"] == f"b{1 - home}"
        assert len(world.backends[home].requests) == 2


async def test_an_observer_that_fails_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is let go, and the answer goes on."""

    def broken(_observer: AnswerObserver, _data: bytes) -> None:
        raise ValueError("cannot read this")

    monkeypatch.setattr(AnswerObserver, "feed", broken)
    async with GatewayWorld(1) as world:
        world.backends[0].script(openai_answer("Hello"))
        assert (await world.chat()).status_code == 200
        world.assert_idle()


# -- ids that others need while the answer runs


def _response_events(gate: asyncio.Event) -> Behaviour:
    return stream(
        *OPENINGS["responses"],
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"resp_1"}}\n\n',
        gates={2: gate},
    )


@pytest.mark.parametrize("with_tenants", [False, True])
async def test_a_response_is_found_while_it_runs(with_tenants: bool) -> None:
    """Read and cancelled by its id before the stream ends, at the backend that has it."""
    options: dict[str, Any] = {}
    headers = {}
    if with_tenants:
        options = {"tenants": [{"name": "a", "keys_env": "KEYS"}], "environ": {"KEYS": "k" * 20}}
        headers = {"authorization": "Bearer " + "k" * 20}
    async with GatewayWorld(3, **options) as world:
        gate = asyncio.Event()
        for backend in world.backends:
            backend.default = _response_events(gate)
        body = {"model": "fake-model", "input": "hi", "stream": True, "background": True}
        request = world.client.build_request("POST", "/v1/responses", json=body, headers=headers)
        answer = await world.client.send(request, stream=True)
        home = int(answer.headers["x-homing-backend"].removeprefix("b"))
        for backend in world.backends:
            backend.default = respond(b'{"id":"resp_1"}')
        for method, path in (("GET", "/v1/responses/resp_1"), ("POST", "/v1/responses/resp_1/cancel")):
            found = await world.client.request(method, path, headers=headers)
            assert (found.status_code, found.headers["x-homing-backend"]) == (200, f"b{home}")
        gate.set()
        await answer.aread()


async def test_a_response_too_large_to_be_observed_is_found_by_its_id() -> None:
    """The id stands at its beginning."""
    large = {"id": "resp_9", "object": "response", "output": "x" * 50_000}
    limits = {"max_answer_observe_bytes": 10_000}
    async with GatewayWorld(3, limits=limits) as world:
        for backend in world.backends:
            backend.script(respond(json.dumps(large).encode()))
        body = {"model": "fake-model", "input": "hi"}
        first = await world.client.post("/v1/responses", json=body)
        for backend in world.backends:
            backend.script(*[respond(b"{}")] * 3)
        follow_up = body | {"previous_response_id": "resp_9"}
        for _ in range(3):
            second = await world.client.post("/v1/responses", json=follow_up)
            assert second.headers["x-homing-backend"] == first.headers["x-homing-backend"]


async def test_silence_before_the_head_is_no_answer() -> None:
    """Where nobody else can answer: a timeout with its own status, and outcome."""
    async with GatewayWorld(1, upstream={"first_byte_timeout_s": 0.2}, health=NEVER_EJECT) as world:
        world.backends[0].script(hang())
        assert (await world.chat()).status_code == 504
        assert list(world.gateway.metrics.requests) == [("chat", "504", "no_answer")]
