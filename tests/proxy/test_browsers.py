"""OPTIONS, HEAD and CORS on the wire: answers, errors and streams that a browser may read, or may not."""

from __future__ import annotations

import pytest
from fakes.backend import respond
from fakes.gateway_world import GatewayWorld
from fakes.raw_client import RawClient

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example.org"
CORS = {"cors": {"allow_origins": [PAGE]}}
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_a_preflight_is_answered_here() -> None:
    """The browser learns methods and headers; no backend sees the question."""
    async with GatewayWorld(downstream=CORS) as world:
        answer = await world.client.options(CHAT, headers=PREFLIGHT)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-methods"] == "POST, OPTIONS"
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
        assert answer.headers["access-control-max-age"] == "600"
        assert answer.headers["vary"] == "Origin"
        assert not answer.content
        stranger = await world.client.options(CHAT, headers=PREFLIGHT | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers
        assert not world.served()


async def test_answers_errors_and_streams_carry_the_permission() -> None:
    """A page must be able to read why it got no answer, too; a stranger's page reads nothing."""
    async with GatewayWorld(downstream=CORS) as world:
        answers = [
            await world.chat(headers={"origin": PAGE}),
            await world.chat(headers={"origin": PAGE}, stream=True),
            await world.client.post(CHAT, content=b"{", headers={"origin": PAGE}),
            await world.client.get("/v1/unknown", headers={"origin": PAGE}),
            await world.client.get("/v1/models", headers={"origin": PAGE}),
            await world.client.get("/health", headers={"origin": PAGE}),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 400, 404, 200, 200]
        for answer in answers:
            assert answer.headers.get_list("access-control-allow-origin") == [PAGE]
            assert answer.headers["vary"] == "Origin"
            assert "x-homing-backend" in answer.headers["access-control-expose-headers"]
        stranger = await world.chat(headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in stranger.headers
        assert stranger.headers["vary"] == "Origin"


async def test_a_backends_own_permission_is_replaced() -> None:
    """Two values of one field count as none, so the gateway's stands alone; its `Vary` is kept."""
    engine_says = respond(headers=(("Access-Control-Allow-Origin", "*"), ("Vary", "Accept")))
    async with GatewayWorld(1, downstream=CORS) as world:
        world.backends[0].script(engine_says)
        answer = await world.chat(headers={"origin": PAGE})
        assert answer.headers.get_list("access-control-allow-origin") == [PAGE]
        assert answer.headers["vary"] == "Accept, Origin"


async def test_without_the_option_a_backends_word_passes() -> None:
    """Off by default: nothing is added, and an engine that speaks for itself is heard."""
    async with GatewayWorld(1) as world:
        world.backends[0].script(respond(headers=(("Access-Control-Allow-Origin", "*"),)))
        answer = await world.chat(headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "vary" not in answer.headers
        preflight = await world.client.options(CHAT, headers=PREFLIGHT)
        assert (preflight.status_code, preflight.headers["allow"]) == (204, "POST, OPTIONS")
        assert not [name for name in preflight.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("path", "allow"),
    [
        (CHAT, "POST, OPTIONS"),
        ("//v1/messages/", "POST, OPTIONS"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/responses/resp_1", "GET, HEAD, DELETE, OPTIONS"),
        ("/health", "GET, HEAD, OPTIONS"),
        ("/v1/images", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
    ],
)
async def test_options_tells_the_methods_of_a_path(path: str, allow: str) -> None:
    """204 with Allow, for APIs, for the gateway's own paths and for passed-through ones."""
    async with GatewayWorld(1, passthrough_paths=["/v1/images"]) as world:
        answer = await world.client.options(f"{world.base_url}{path}")
        assert (answer.status_code, answer.headers["allow"], answer.content) == (204, allow, b"")
        assert not world.served()


async def test_options_of_an_unknown_path_is_404() -> None:
    """In JSON, like every other error; readable for pages where they are allowed."""
    async with GatewayWorld(1, downstream=CORS) as world:
        answer = await world.client.options("/v1/unknown", headers=PREFLIGHT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert answer.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/fake-model", "/health", "/ready", "/metrics"])
async def test_head_is_get_without_its_body(path: str) -> None:
    """The same status and length, no byte of a body, and the connection serves the next request."""
    async with GatewayWorld(1) as world, RawClient(world.gateway.port) as client:
        await client.send(b"HEAD %b HTTP/1.1\r\nHost: t\r\n\r\n" % path.encode())
        head = await client.read_response(method="HEAD")
        await client.send(b"GET %b HTTP/1.1\r\nHost: t\r\n\r\n" % path.encode())
        body = await client.read_response(method="GET")
        assert (head.status, body.status) == (200, 200)
        assert head.header("content-type") == body.header("content-type")
        assert body.body
        if path != "/metrics":  # the other one's length changes with what it counts
            assert head.header("content-length") == body.header("content-length")
