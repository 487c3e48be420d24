"""What requests cost a tenant in tokens, on the wire: reported, seen, or nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fakes import backend as fake
from fakes.gateway_world import GatewayWorld

TOKEN = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'
STOP = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def usage_chunk(prompt: int, completion: int) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: %b\n\n" % json.dumps({"id": "c", "choices": [], "usage": usage}).encode()


def answer(**usage: Any) -> fake.Behaviour:
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    return fake.respond(json.dumps({"id": "c", "choices": [choice], "usage": usage}).encode())


@contextlib.asynccontextmanager
async def limited(tokens_per_minute: int = 100_000, **more: Any) -> AsyncIterator[GatewayWorld]:
    """One engine that is not asked for usage, and no time in which anything could be refilled."""
    limits = {"per_tenant": {"tokens_per_minute": tokens_per_minute, **more}, "ask_for_usage": "never"}
    async with GatewayWorld(num_backends=1, limits=limits) as world:
        world.gateway.limiter._clock = lambda: 0.0
        yield world


async def left(world: GatewayWorld) -> int:
    """What the tenant has left, told by a count, which costs nothing itself."""
    told = await world.client.post("/tokenize", json={"model": "fake-model", "prompt": "x"})
    return int(told.headers["x-ratelimit-remaining-tokens"])


async def spent(world: GatewayWorld, allowance: int = 100_000) -> int:
    return allowance - await left(world)


X = "x" * 32_000
COUNTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": X}]}),
    ("/tokenize", {"prompt": X}),
    ("/v1/responses/input_tokens", {"input": X}),
    ("/detokenize", {"tokens": [1] * 9_000}),
]


@pytest.mark.parametrize(("path", "body"), COUNTS, ids=[path for path, _ in COUNTS])
async def test_counting_tokens_spends_none(path: str, body: dict[str, Any]) -> None:
    """N08: nor is a count refused where the bucket is empty; it counts as a request."""
    body = body | {"model": "fake-model"}
    async with limited(20_000, requests_per_minute=7) as world:
        for _ in range(4):
            world.backends[0].script(fake.respond(b'{"input_tokens":8000,"usage":{"prompt_tokens":8000}}'))
            counted = await world.client.post(path, json=body)
            assert counted.status_code == 200
        assert int(counted.headers["x-ratelimit-remaining-tokens"]) == 20_000
        world.backends[0].script(answer(prompt_tokens=19_000, completion_tokens=4_000))
        assert (await world.chat(text="x" * 40_000)).status_code == 200
        assert (await world.chat()).status_code == 429
        assert (await world.client.post(path, json=body)).status_code == 200
        assert (await world.client.post(path, json=body)).status_code == 200
        refused = await world.client.post(path, json=body)
        assert refused.status_code == 429
        assert "requests per minute" in refused.text


async def test_streams_without_usage_are_charged_by_what_was_seen() -> None:
    """N09: 1,500 events each of 2,000 tokens a minute; the third is refused."""
    async with limited(2_000) as world:
        world.backends[0].default = fake.stream(*[TOKEN * 100] * 15, STOP, DONE)
        statuses = [(await world.chat(stream=True)).status_code for _ in range(4)]
        assert statuses == [200, 200, 429, 429]


async def test_leaving_a_stream_early_saves_nothing() -> None:
    """What has passed is charged, whether or not its end would have told; so is a stream that breaks."""
    async with limited() as world:
        world.backends[0].script(fake.stream(TOKEN * 500, then="wait"))
        async with world.client.stream("POST", "/v1/chat/completions", json=stream_body()) as streamed:
            async for data in streamed.aiter_bytes():
                assert data
                break
        await world.wait_for(lambda: world.gateway.proxy.num_in_flight == 0)
        assert 450 <= await spent(world) <= 550
        world.backends[0].script(fake.stream(TOKEN * 500, then="reset"))
        with pytest.raises(httpx.RemoteProtocolError):
            await world.chat(stream=True)
        assert 950 <= await spent(world) <= 1_050
        world.assert_idle()


async def test_an_early_report_of_a_stream_is_not_its_last() -> None:
    """Anthropic's streams report one token at their start."""
    usage = {"input_tokens": 100, "output_tokens": 1}
    start = {"type": "message_start", "message": {"id": "m", "usage": usage}}
    delta = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"w "}}\n\n'
    opening = b"event: message_start\ndata: %b\n\n" % json.dumps(start).encode()
    async with limited() as world:
        world.backends[0].script(fake.stream(opening, delta * 400, then="close"))
        body = {"model": "fake-model", "max_tokens": 500, "stream": True, "messages": []}
        with pytest.raises(httpx.RemoteProtocolError):
            await world.client.post("/v1/messages", json=body)
        assert 480 <= await spent(world) <= 520


async def test_what_is_seen_is_measured_as_answers_that_report() -> None:
    """An engine with three tokens to an event, and bodies of eight bytes to a token."""
    async with limited(10**6) as world:
        for _ in range(50):
            world.backends[0].script(fake.stream(TOKEN * 100, STOP, usage_chunk(1, 300), DONE))
            await world.chat(stream=True)
        before = await left(world)
        world.backends[0].script(fake.stream(TOKEN * 1_000, STOP, DONE))
        await world.chat(stream=True)
        assert 2_700 <= before - await left(world) <= 3_300
        text = json.dumps({"id": "c", "choices": [{"message": {"content": "x" * 8_000}}], "usage": None})
        told = text.replace("null", '{"prompt_tokens":1,"completion_tokens":1000}')
        for _ in range(50):
            world.backends[0].script(fake.respond(told.encode()))
            await world.chat()
        before = await left(world)
        world.backends[0].script(fake.respond(text.encode()))
        await world.chat()
        assert 900 <= before - await left(world) <= 1_100


async def test_a_whole_text_in_one_event_is_more_than_one_token() -> None:
    """An engine, or a client's option, may gather many tokens in an event."""
    async with limited() as world:
        world.backends[0].script(fake.stream(TOKEN.replace(b"word", b"x" * 40_000), STOP, DONE))
        await world.chat(stream=True)
        assert 6_500 <= await spent(world) <= 10_500


async def test_a_body_that_reports_nothing_is_charged_by_its_bytes() -> None:
    """One that is too long to be read too."""
    async with limited() as world:
        text = json.dumps({"id": "c", "choices": [{"message": {"content": "x" * 40_000}}]})
        world.backends[0].script(fake.respond(text.encode()))
        await world.chat()
        assert 9_500 <= await spent(world) <= 10_500


@pytest.mark.parametrize(
    "told",
    [
        fake.respond(b'{"error":{"type":"overloaded_error"}}', status=529),
        fake.respond(b'{"error":{"message":"no","code":500}}'),
        fake.stream(b'data: {"error":{"message":"no","code":400}}\n\n', DONE),
        fake.reset(),
    ],
)
async def test_what_computed_nothing_costs_nothing(told: fake.Behaviour) -> None:
    """Refusals, errors in place of content, no answer: the estimate of the prompt is given back."""
    async with limited() as world:
        world.backends[0].script(told, told)
        await world.chat(text="word " * 4_000, stream=True)
        assert await spent(world) == 0


async def test_vectors_and_scores_are_no_tokens() -> None:
    """Without usage the prompt is charged as estimated, and the numbers of the answer are not."""
    async with limited() as world:
        vector = {"data": [{"embedding": [0.125] * 4_096}]}
        for path in ("/v1/embeddings", "/rerank"):
            world.backends[0].script(fake.respond(json.dumps(vector).encode()))
            body = {"model": "fake-model", "input": "x" * 400, "query": "x" * 400, "documents": []}
            assert (await world.client.post(path, json=body)).status_code == 200
        assert await spent(world) <= 250


@pytest.mark.parametrize("count", [10**9, 10**30, -(10**9)])
async def test_an_absurd_report_does_not_lock_a_tenant_for_days(count: int) -> None:
    """More than the bytes that passed can mean, or less than nothing: S, low."""
    async with limited(10**6) as world:
        world.backends[0].script(answer(prompt_tokens=count, completion_tokens=count))
        assert (await world.chat(session="s")).status_code == 200
        assert 0 <= await spent(world, 10**6) <= 135_000
        sessions = (await world.admin.get("/admin/v1/sessions")).json()["sessions"]
        assert 0 <= sessions[0]["context_tokens"] <= 135_000


@pytest.mark.parametrize(("rate", "cost"), [(1.0, 1_010), (0.25, 335), (0.0, 110)])
async def test_cached_tokens_count_at_the_tenants_rate(rate: float, cost: int) -> None:
    """As reported, of the prompt alone."""
    async with limited(cached_token_rate=rate) as world:
        details = {"cached_tokens": 900}
        world.backends[0].script(
            answer(prompt_tokens=1_000, completion_tokens=10, prompt_tokens_details=details)
        )
        await world.chat(text="x" * 4_000)
        assert await spent(world) == cost


async def test_a_job_in_the_background_is_charged_when_its_answer_is_fetched() -> None:
    """The prompt when it is asked for, the rest once it is known; looking on costs nothing."""
    job: dict[str, Any] = {"id": "resp_1", "object": "response", "background": True, "status": "queued"}
    usage = {"input_tokens": 100, "output_tokens": 5_000}
    async with limited() as world:
        world.backends[0].script(fake.respond(json.dumps(job | {"usage": None}).encode()))
        body = {"model": "fake-model", "input": "x" * 400, "background": True}
        await world.client.post("/v1/responses", json=body)
        assert await spent(world) <= 110
        world.backends[0].script(fake.respond(json.dumps(job).encode()))
        await world.client.get("/v1/responses/resp_1")
        assert await spent(world) <= 110
        world.backends[0].script(fake.respond(json.dumps(job | {"usage": usage}).encode()))
        await world.client.get("/v1/responses/resp_1")
        assert 5_090 <= await spent(world) <= 5_110
        plain = {"id": "resp_2", "object": "response", "background": False, "usage": usage}
        world.backends[0].script(fake.respond(json.dumps(plain).encode()))
        await world.client.get("/v1/responses/resp_2")
        assert 5_090 <= await spent(world) <= 5_110


def stream_body() -> dict[str, Any]:
    return {"model": "fake-model", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
