"""Streams whose usage the gateway asks for itself, on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fakes import backend as fake
from fakes.gateway_world import GatewayWorld

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "fake-model",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
}
LIMITED = {"per_tenant": {"tokens_per_minute": 100_000}}
USAGE = {"prompt_tokens": 1_000, "completion_tokens": 2_000}
ASKED = {"include_usage": True, "continuous_usage_stats": False}


def event(choices: list[dict[str, Any]], **fields: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps({"id": "chatcmpl-1", "choices": choices, **fields}).encode()


CONTENT = [
    event([{"index": 0, "delta": {"role": "assistant"}}]),
    event([{"index": 0, "delta": {"content": 'a "usage" of words'}}]),
    event([{"index": 1, "delta": {"content": "of two choices"}}]),
    event([{"index": 0, "delta": {}, "finish_reason": "stop"}]),
    event([{"index": 1, "delta": {}, "finish_reason": "stop"}]),
]
REPORT = event([], usage=USAGE)
DONE = b"data: [DONE]\n\n"


def engine(*, splits_at: int = 20, honours: bool = True, content_length: bool = False) -> fake.Behaviour:
    """Reports when asked, as vLLM does; the report comes in two reads."""

    async def behave(turn: fake.Turn) -> None:
        asked = json.loads(turn.request.body or b"{}").get("stream_options") or {}
        reports = [REPORT[:splits_at], REPORT[splits_at:]] if asked.get("include_usage") and honours else []
        if not content_length:
            await fake.stream(*CONTENT, *reports, DONE)(turn)
            return
        body = b"".join([*CONTENT, *reports, DONE])
        await fake.respond(body, headers=(("content-type", "text/event-stream"),))(turn)

    return behave


@contextlib.asynccontextmanager
async def world(*kinds: str, limits: dict[str, Any] | None = None) -> AsyncIterator[GatewayWorld]:
    """No time passes in which an allowance could be refilled."""
    kinds = kinds or ("vllm",)
    async with GatewayWorld(len(kinds), kinds=kinds, limits=LIMITED if limits is None else limits) as one:
        one.gateway.limiter._clock = lambda: 0.0
        for backend in one.backends:
            backend.default = engine()
        yield one


def plain() -> bytes:
    return b"".join([*CONTENT, DONE])


async def spent(one: GatewayWorld) -> int:
    await one.wait_for(lambda: one.gateway.proxy.num_in_flight == 0)
    told = await one.client.post("/tokenize", json={"model": "fake-model", "prompt": "x"})
    return 100_000 - int(told.headers["x-ratelimit-remaining-tokens"])


def sent(one: GatewayWorld) -> list[bytes]:
    return [
        request.body for backend in one.backends for request in backend.requests if request.target == CHAT
    ]


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trtllm", "torch"])
@pytest.mark.parametrize(
    "options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}]
)
async def test_a_limited_tenants_stream_is_asked_and_its_client_sees_nothing_of_it(
    kind: str, options: dict[str, Any]
) -> None:
    """N09, V09: charged as reported; every byte that the client gets is what it gets without the question."""
    async with world(kind) as one:
        body = json.dumps(BODY | options).encode()
        for number in range(20):
            one.backends[0].script(engine(splits_at=1 + number * 5))
            answer = await one.client.post(CHAT, content=body)
            assert answer.content == plain()
            assert await spent(one) == 3_000 * (number + 1)
        assert sent(one)[0].startswith(body[:-1])
        assert json.loads(sent(one)[0]) == BODY | {"stream_options": ASKED}
        one.assert_idle()


@pytest.mark.parametrize(
    ("kind", "limits", "fields"),
    [
        ("openai", LIMITED, {}),
        ("llamacpp", LIMITED, {}),
        ("vllm", {}, {}),
        ("vllm", {"per_tenant": {"requests_per_minute": 100}}, {}),
        ("vllm", LIMITED | {"ask_for_usage": "never"}, {}),
        ("vllm", LIMITED, {"stream_options": {"include_usage": True}}),
        ("vllm", LIMITED, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        ("vllm", LIMITED, {"stream_options": {}}),
        ("vllm", LIMITED, {"stream_options": "odd"}),
        ("vllm", LIMITED, {"stream": False}),
    ],
)
async def test_everybody_elses_bytes_pass_as_they_are(
    kind: str, limits: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Both ways: other kinds of engines, tenants without such a limit, clients that have asked."""
    async with world(kind, limits=limits) as one:
        one.backends[0].default = fake.stream(*CONTENT, REPORT, DONE)
        body = json.dumps(BODY | fields, indent=1).encode()
        answer = await one.client.post(CHAT, content=body)
        assert answer.content == b"".join([*CONTENT, REPORT, DONE])
        assert sent(one) == [body]


async def test_all_streams_can_be_asked() -> None:
    """V09: then the gateway learns from them too."""
    async with world(limits={"ask_for_usage": "always"}) as one:
        assert (await one.client.post(CHAT, json=BODY, headers={"x-session-id": "s"})).content == plain()
        legacy = {"model": "fake-model", "prompt": "hi", "stream": True}
        assert (await one.client.post("/v1/completions", json=legacy)).content == plain()
        assert all(request.json["stream_options"] == ASKED for request in one.backends[0].requests)
        one.gateway.ledger.drain()
        assert 'homing_completion_tokens_total{backend="b0"} 4000' in (await one.client.get("/metrics")).text


async def test_a_compressed_body_is_left_as_it_is() -> None:
    """And charged by what is seen."""
    async with world() as one:
        one.backends[0].default = fake.stream(*CONTENT, DONE)
        body = gzip.compress(json.dumps(BODY).encode())
        answer = await one.client.post(CHAT, content=body, headers={"content-encoding": "gzip"})
        assert answer.content == plain()
        assert sent(one) == [body]
        assert 0 < await spent(one) < 20


async def test_an_engine_that_does_not_do_as_asked_changes_nothing() -> None:
    """It is charged by what is seen."""
    async with world() as one:
        one.backends[0].default = engine(honours=False)
        assert (await one.client.post(CHAT, json=BODY)).content == plain()
        assert 0 < await spent(one) < 20


async def test_a_report_that_has_content_too_is_not_dropped() -> None:
    """Nor a stream's length believed, which the missing chunk makes wrong."""
    last = event([{"index": 0, "delta": {"content": "end"}}], usage=USAGE)
    async with world() as one:
        one.backends[0].script(fake.stream(*CONTENT, last, DONE))
        assert (await one.client.post(CHAT, json=BODY)).content == b"".join([*CONTENT, last, DONE])
        one.backends[0].script(engine(content_length=True))
        answer = await one.client.post(CHAT, json=BODY)
        assert answer.content == plain()
        assert "content-length" not in answer.headers


async def test_errors_and_other_answers_pass_whole() -> None:
    """An engine that refuses, or does not stream."""
    async with world() as one:
        told = json.dumps({"choices": [], "usage": USAGE}).encode()
        for behaviour, status in ((fake.respond(told), 200), (fake.respond(told, status=400), 400)):
            one.backends[0].script(behaviour)
            answer = await one.client.post(CHAT, json=BODY)
            assert (answer.status_code, answer.content) == (status, told)
            assert answer.headers["content-length"] == str(len(told))


async def test_after_a_fail_over_each_kind_gets_what_it_takes() -> None:
    """vLLM is asked and fails; the other kind gets the body as received, and its stream passes whole."""
    async with world("vllm", "openai") as one:
        body = json.dumps(BODY).encode()
        answers = b"".join([*CONTENT, REPORT, DONE])
        one.backends[1].default = fake.stream(*CONTENT, REPORT, DONE)
        one.backends[0].default = fake.respond(b"{}", status=503)
        for _ in range(4):
            assert (await one.client.post(CHAT, content=body)).content == answers
        assert {request.body for request in one.backends[1].requests} == {body}
        assert all(request.json["stream_options"] == ASKED for request in one.backends[0].requests)
        assert one.backends[0].requests


async def test_a_stale_connection_changes_nothing() -> None:
    """The request is sent again on a fresh one, and its answer is read as the first would have been."""
    async with world() as one:
        await one.client.post(CHAT, json=BODY)
        one.backends[0].script(fake.raw(b"", then="close"))
        answer = await one.client.post(CHAT, json=BODY)
        assert answer.content == plain()
        assert await spent(one) >= 5_900


async def test_a_stream_that_breaks_shows_no_half_of_the_report() -> None:
    """The client gets whole events and the error."""
    async with world() as one:
        one.backends[0].script(fake.stream(*CONTENT, REPORT[:40], then="close"))
        pieces: list[bytes] = []
        with pytest.raises(httpx.RemoteProtocolError):
            await read(one, pieces)
        got = b"".join(pieces)
        assert got.startswith(b"".join(CONTENT))
        assert b"usage" not in got.removeprefix(b"".join(CONTENT))
        assert b'"error"' in got


async def read(one: GatewayWorld, pieces: list[bytes]) -> None:
    async with one.client.stream("POST", CHAT, json=BODY) as answer:
        async for data in answer.aiter_bytes():
            pieces.append(data)  # noqa: PERF401 - kept when the stream breaks


async def test_events_pass_as_they_come() -> None:
    """Nothing that is complete waits for what follows."""
    gates = {number: asyncio.Event() for number in range(1, len(CONTENT))}
    async with world() as one:
        one.backends[0].script(fake.stream(*CONTENT, REPORT, DONE, gates=gates))
        gates[1].set()  # an answer begins with its first content
        async with one.client.stream("POST", CHAT, json=BODY) as answer:
            got, number = b"", 1
            async for data in answer.aiter_bytes():
                got += data
                while number < len(CONTENT) - 1 and got.startswith(b"".join(CONTENT[: number + 1])):
                    number += 1
                    gates[number].set()
        assert got == plain()


async def test_llama_cpp_reports_without_being_asked() -> None:
    """In the last chunk of every stream, which the client gets as ever."""
    timings = {"cache_n": 900, "prompt_n": 100, "predicted_n": 2_000, "predicted_ms": 5.0}
    last = event([{"index": 0, "delta": {}, "finish_reason": "stop"}], timings=timings)
    async with world("llamacpp") as one:
        one.backends[0].script(fake.stream(*CONTENT[:3], last, DONE))
        assert (await one.client.post(CHAT, json=BODY)).content == b"".join([*CONTENT[:3], last, DONE])
        assert await spent(one) == 3_000
