"""The request side on raw sockets: what a client may send, what of it reaches a backend, what comes back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes.backend import FakeBackend, ReceivedRequest, Turn, raw, respond
from fakes.gateway_world import GatewayWorld
from fakes.raw_client import RawClient, RawResponse, post

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "fake-model", "messages": [{"role": "user", "content": "hello"}]}).encode()


@pytest.fixture
async def world() -> AsyncIterator[GatewayWorld]:
    async with GatewayWorld(1) as started:
        yield started


async def ask(world: GatewayWorld, request: bytes, *, method: str = "POST") -> RawResponse:
    """One request on a connection of its own."""
    async with RawClient(world.gateway.port) as client:
        await client.send(request)
        return await client.read_response(method=method)


def received(world: GatewayWorld) -> ReceivedRequest:
    """The one request that reached a backend."""
    (request,) = [one for backend in world.backends for one in backend.requests]
    return request


# -- expectations and versions


async def test_a_body_is_invited_once(world: GatewayWorld) -> None:
    """`Expect: 100-continue` is answered here and goes no further."""
    head = post(CHAT, BODY, "Expect: 100-continue").removesuffix(BODY)
    async with RawClient(world.gateway.port) as client:
        await client.send(head)
        assert (await client.read_head())[0] == 100
        await client.send(BODY)
        answer = await client.read_response()
    assert (answer.status, answer.num_interim) == (200, 0)
    assert received(world).header("expect") is None
    assert received(world).body == BODY


async def test_an_expectation_that_cannot_be_met_is_417_in_json(world: GatewayWorld) -> None:
    """The body is then not read: the connection ends, and a request behind it is none."""
    head = post(CHAT, BODY, "Expect: 200-ok").removesuffix(BODY)
    async with RawClient(world.gateway.port) as client:
        await client.send(head)
        answer = await client.read_response()
        assert answer.status == 417
        assert json.loads(answer.body)["error"]["code"] == "expectation_failed"
        assert await client.read_to_end() == b""
    assert not world.served()


async def test_a_body_that_is_too_long_is_not_invited() -> None:
    """413 instead of 100: nobody uploads for nothing."""
    async with (
        GatewayWorld(1, downstream={"max_body_bytes": 10}) as world,
        RawClient(world.gateway.port) as client,
    ):
        await client.send(post(CHAT, BODY, "Expect: 100-continue").removesuffix(BODY))
        answer = await client.read_response()
        assert (answer.status, answer.num_interim) == (413, 0)
        assert await client.read_to_end() == b""


@pytest.mark.parametrize("is_stream", [False, True])
async def test_http10_clients_are_served(world: GatewayWorld, is_stream: bool) -> None:
    """No chunks, no interim answer for an `Expect`; a stream ends with its connection."""
    body = BODY.replace(b'"messages"', b'"stream":%b,"messages"' % json.dumps(is_stream).encode())
    answer = await ask(world, post(CHAT, body, "Expect: 100-continue", version="1.0"))
    assert (answer.status, answer.num_interim, answer.chunks) == (200, 0, [])
    assert answer.header("transfer-encoding") is None
    assert answer.header("connection") == "close"
    assert answer.body.endswith(b"data: [DONE]\n\n" if is_stream else b"}")


@pytest.mark.parametrize("told", [None, b"no-store"])
async def test_no_cache_keeps_an_event_stream(told: bytes | None) -> None:
    """G09: caches and compressing proxies hold back what does not say so; an engine's word stands."""
    fields = b"" if told is None else b"cache-control: " + told + b"\r\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + fields + b"connection: close\r\n\r\n"
    events = b"data: {}\n\ndata: [DONE]\n\n"
    async with GatewayWorld(1) as world:
        world.backends[0].default = raw(head + events, then="close")
        answer = await ask(world, post(CHAT, BODY))
    assert [value for name, value in answer.headers if name == "cache-control"] == [
        "no-cache" if told is None else told.decode()
    ]
    assert answer.body == events


# -- targets and limits


@pytest.mark.parametrize(
    "target", ["http://elsewhere.example" + CHAT, "https://elsewhere.example:1" + CHAT + "/", CHAT + "?a=b#c"]
)
async def test_targets_lead_to_their_path(world: GatewayWorld, target: str) -> None:
    """The host of an absolute target decides nothing, a fragment is nobody's business."""
    assert (await ask(world, post(target, BODY))).status == 200
    assert received(world).target.partition("?")[0] == CHAT
    assert received(world).header("host") == world.backends[0].base_url.removeprefix("http://")


BAD_HEADS = {
    "a long field": (["X-Long: " + "x" * 40_000], 431, "headers_too_large"),
    "many fields": ([f"X-{number}: 1" for number in range(300)], 431, "headers_too_large"),
    "two framings": (["Transfer-Encoding: chunked"], 400, "invalid_request"),
    "two lengths": (["Content-Length: 5"], 400, "invalid_request"),
    "a NUL": (["X-Bad\x00: 1"], 400, "invalid_request"),
    "a space before the colon": (["X-Bad : 1"], 400, "invalid_request"),
    "a folded field": (["X-Bad: 1", " 2"], 400, "invalid_request"),
}


async def test_heads_that_cannot_be_served(world: GatewayWorld) -> None:
    """Too large or ambiguous: JSON, closed, counted, and no backend sees a byte."""
    for name, (lines, status, code) in BAD_HEADS.items():
        async with RawClient(world.gateway.port) as client:
            await client.send(post(CHAT, BODY, *lines))
            answer = await client.read_response()
            assert (answer.status, json.loads(answer.body)["error"]["code"]) == (status, code), name
            assert await client.read_to_end() == b"", name
    assert not world.served()
    metrics = (await world.client.get("/metrics")).text
    assert 'homing_requests_total{api="other",status="431",outcome="not_sent"} 2' in metrics
    assert 'homing_requests_total{api="other",status="400",outcome="not_sent"} 5' in metrics


# -- headers both ways


async def test_what_belongs_to_one_connection_stays_there(world: GatewayWorld) -> None:
    """Hop-by-hop fields, and those that `Connection` names, pass in neither direction; all others do."""
    engine_head = (
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive, x-engine-hop\r\nX-Engine-Hop: 1\r\n"
        b"Keep-Alive: timeout=5\r\nProxy-Authenticate: x\r\nX-Homing-Backend: forged\r\n"
        b"X-Engine: kept\r\nContent-Length: 2\r\n\r\n{}"
    )
    world.backends[0].script(raw(engine_head))
    answer = await ask(
        world,
        post(
            CHAT,
            BODY,
            "Connection: keep-alive, x-client-hop",
            "X-Client-Hop: 1",
            "Keep-Alive: timeout=5",
            "TE: trailers",
            "Proxy-Authorization: secret",
            "Accept-Encoding: gzip",
            "X-Client: kept",
        ),
    )
    sent = {name for name, _ in received(world).headers}
    assert "x-client" in sent
    assert sent.isdisjoint(
        {"x-client-hop", "keep-alive", "te", "proxy-authorization", "connection", "accept-encoding"}
    )
    came = {name for name, _ in answer.headers}
    assert answer.header("x-engine") == "kept"
    assert answer.header("x-homing-backend") == "b0"
    assert came.isdisjoint({"x-engine-hop", "keep-alive", "proxy-authenticate", "connection"})


async def test_who_speaks_for_whom(world: GatewayWorld) -> None:
    """Traces and credentials pass, a request id is made, our own names and forged origins are dropped."""
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    answer = await ask(
        world,
        post(
            CHAT,
            BODY,
            f"traceparent: {trace}",
            "tracestate: a=1",
            "Authorization: Bearer sk-1",
            "X-Homing-Backend: b9",
            "X-Homing-Anything: 1",
            "X-Forwarded-For: 10.0.0.1",
            "X-Data-Parallel-Rank: 3",
        ),
    )
    request = received(world)
    assert request.header("traceparent") == trace
    assert request.header("tracestate") == "a=1"
    assert request.header("authorization") == "Bearer sk-1"
    assert request.header("x-request-id") == answer.header("x-request-id")
    names = {name for name, _ in request.headers}
    assert not [name for name in names if name.startswith(("x-homing", "x-forwarded", "x-data-parallel"))]


async def test_a_backends_own_key_goes_with_everything() -> None:
    """B45: on every path, multipart included, and with every probe; the client's keys stay here."""

    async def guarded(turn: Turn) -> None:
        is_known = (
            turn.request.header("authorization") == "Bearer W" and turn.request.header("x-api-key") is None
        )
        models = b'{"object":"list","data":[{"id":"fake-model"}]}'
        await respond(models if is_known else b'{"error":{}}', status=200 if is_known else 401)(turn)

    async with FakeBackend(default=guarded) as backend:
        fleet = [{"id": "b0", "url": backend.base_url, "engine": "vllm", "api_key_env": "BACKEND_KEY"}]
        async with GatewayWorld(0, backends=fleet, environ={"BACKEND_KEY": "W"}) as world:
            keys = {"authorization": "Bearer C", "x-api-key": "C"}
            chat = await world.chat(headers=keys)
            keyless = await world.chat()
            form = await world.client.post(
                "/v1/audio/transcriptions", data={"model": "fake-model"}, files={"file": b"x"}, headers=keys
            )
            asked = await world.client.get("/v1/responses/resp_1", headers=keys)
            answers = [chat, keyless, form, asked]
            assert [answer.status_code for answer in answers] == [200] * 4
            assert world.state(0) == "ready"
        assert {request.header("authorization") for request in backend.requests} == {"Bearer W"}


# -- APIs


async def test_a_stored_response_is_asked_where_it_is() -> None:
    """GET, its input items, cancel and DELETE of a response go to the backend that made it, body and all."""
    async with GatewayWorld(3) as world:
        stored = json.dumps(
            {"id": "resp_1", "object": "response", "status": "completed", "output": []}
        ).encode()
        for backend in world.backends:
            backend.default = respond(stored)
        made = await world.client.post(
            "/v1/responses", json={"model": "fake-model", "input": "hi", "store": True}
        )
        home = made.headers["x-homing-backend"]
        answers = [
            await world.client.get("/v1/responses/resp_1"),
            await world.client.get("/v1/responses/resp_1/input_items?limit=2"),
            await world.client.post("/v1/responses/resp_1/cancel"),
            await world.client.delete("/v1/responses/resp_1"),
        ]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert {answer.headers["x-homing-backend"] for answer in answers} == {home}
        lines = [(one.method, one.target) for one in world.backends[int(home[1])].requests[1:]]
        assert lines == [
            ("GET", "/v1/responses/resp_1"),
            ("GET", "/v1/responses/resp_1/input_items?limit=2"),
            ("POST", "/v1/responses/resp_1/cancel"),
            ("DELETE", "/v1/responses/resp_1"),
        ]


OPERATIONS: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/rerank": {"query": "q", "documents": ["a"]},
    "/rerank": {"query": "q", "documents": ["a"]},
    "/v2/rerank": {"query": "q", "documents": ["a"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/classify": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
    "/v1/audio/speech": {"input": "a", "voice": "alloy"},
}


async def test_every_operation_reaches_an_engine(world: GatewayWorld) -> None:
    """The same path, query and bytes arrive; the answer comes back as it was given."""
    for path, body in OPERATIONS.items():
        world.backends[0].requests.clear()
        world.backends[0].script(respond(b'{"as":"given"}'))
        content = json.dumps({"model": "fake-model"} | body).encode()
        answer = await world.client.post(f"{path}?beta=true", content=content)
        assert (answer.status_code, answer.content) == (200, b'{"as":"given"}'), path
        assert (received(world).target, received(world).body) == (f"{path}?beta=true", content)


async def test_the_list_of_models_in_any_spelling() -> None:
    """One list over all backends, each model once; without a backend it is a 503."""
    spellings = ("/v1/models", "/v1/models/", "http://x/v1/models", "/v1/models?limit=1")
    async with GatewayWorld(3) as world:
        world.backends[2].model = "other-model"
        await world.wait_for(lambda: len(_listed(world)) == 2)
        for target in spellings:
            answer = await ask(world, _get(target), method="GET")
            assert [model["id"] for model in json.loads(answer.body)["data"]] == ["fake-model", "other-model"]
    async with GatewayWorld(0) as empty:
        for target in spellings:
            assert (await ask(empty, _get(target), method="GET")).status == 503


def _get(target: str) -> bytes:
    return f"GET {target} HTTP/1.1\r\nHost: t\r\n\r\n".encode()


def _listed(world: GatewayWorld) -> set[str]:
    backends = world.gateway.fleet.view.backends.values()
    return {model for backend in backends for model in backend.models or ()}


async def test_an_unknown_path_is_404_in_json(world: GatewayWorld) -> None:
    """Whatever the method."""
    for method in ("GET", "POST", "DELETE", "PUT"):
        answer = await ask(world, f"{method} /v1/nothing HTTP/1.1\r\nHost: t\r\n\r\n".encode())
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (404, "not_found")
        assert answer.header("x-request-id")


@pytest.mark.parametrize("is_form", [False, True])
async def test_a_passed_through_path_heeds_the_model(is_form: bool) -> None:
    """N22: each engine has a model of its own; a name that is nobody's model decides nothing."""
    async with GatewayWorld(3, passthrough_paths=["/v1/images/generations"]) as world:
        for number, backend in enumerate(world.backends):
            backend.model, backend.default = f"painter-{number}", respond(b"ok")
        await world.wait_for(lambda: len(_listed(world)) == 3)
        for number in [0, 1, 2] * 4:
            fields = {"model": f"painter-{number}", "prompt": "a boat"}
            sent = {"files": {"image": b"png"}, "data": fields} if is_form else {"json": fields}
            answer = await world.client.post("/v1/images/generations", **sent)
            assert (answer.status_code, answer.headers["x-homing-backend"]) == (200, f"b{number}")
        other = await world.client.post("/v1/images/generations", json={"model": "standard-3"})
        assert other.status_code == 200


async def test_a_passed_through_path_reaches_an_engine() -> None:
    """Any method and any bytes, with a session header followed like everywhere."""
    async with GatewayWorld(3, passthrough_paths=["/v1/images", "/v1/images/*"]) as world:
        for backend in world.backends:
            backend.default = respond(b"ok")
        session = {"x-session-id": "s-1"}
        made = await world.client.post("/v1/images", content=b"\x00\xff not json", headers=session)
        read = await world.client.get("/v1/images/image-1/content", headers=session)
        assert (made.status_code, read.status_code) == (200, 200)
        assert made.headers["x-homing-backend"] == read.headers["x-homing-backend"]
        assert (await world.client.get("/v1/imagesystem")).status_code == 404
