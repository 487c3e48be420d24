"""Bad requests get the right status, an error in the API's shape and the field; no backend sees them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fakes.gateway_world import GatewayWorld

from gateway.observability.logs import AccessLog

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "model"),
        ({"model": "", "messages": []}, "model"),
        ({"model": 7, "messages": []}, "model"),
        ({"model": "fake-model"}, "messages"),
        ({"model": "fake-model", "messages": None}, "messages"),
        ({"model": "fake-model", "messages": 123}, "messages"),
    ],
)
async def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    """B42: 400 names the field, also when the model could not be resolved anyway."""
    async with GatewayWorld() as world:
        answer = await world.client.post(CHAT, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert not world.served()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"model":"a"} x', b"[" * 200_000, b"a=b"],
)
async def test_what_is_no_json_object_is_400(content: bytes) -> None:
    """B40, B42: malformed JSON, other JSON values, deep nesting and forms are the client's errors."""
    async with GatewayWorld() as world:
        answer = await world.client.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert not world.served()


@pytest.mark.parametrize("model", ["no-such-model", "with/slash", "with space"])
async def test_an_unknown_model_is_404(model: str) -> None:
    """B42: the model is well-formed, but no backend serves it."""
    async with GatewayWorld() as world:
        answer = await world.client.post(
            CHAT, json={"model": model, "messages": [{"role": "user", "content": "hi"}]}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        metrics = (await world.client.get("/metrics")).text
        assert model not in metrics  # a client must not be able to make series


async def test_an_unknown_model_is_told_shortly_and_in_plain_characters() -> None:
    """G09: what a client wrote may reach terminals and log viewers: bounded, nothing that they obey."""
    model = "\x1b[2J\u202e\n" + "m" * 500
    async with GatewayWorld() as world:
        answer = await world.client.post(
            CHAT, json={"model": model, "messages": [{"role": "user", "content": "hi"}]}
        )
        listed = await world.client.get("/v1/models/" + "m" * 9_000)
    for one in (answer, listed):
        message = one.json()["error"]["message"]
        assert one.status_code == 404
        assert len(message) < 300
        assert message.isprintable()


async def test_new_names_in_each_request_make_no_series_and_no_long_lines() -> None:
    """G09: models, paths, methods and ids are the clients' to choose: what stays of them is bounded."""
    lines: list[bytes] = []
    async with GatewayWorld(1) as world:
        recorder = world.gateway.recorder
        recorder.log, recorder.logs_requests = AccessLog(lines.append), True
        await _name_everything_anew(world, 0)
        first = _series((await world.client.get("/metrics")).text)
        for number in range(1, 40):
            await _name_everything_anew(world, number)
        assert _series((await world.client.get("/metrics")).text) == first
    assert len(lines) >= 80
    assert max(map(len, lines)) < 1_000


async def _name_everything_anew(world: GatewayWorld, number: int) -> None:
    name = f"{number}-" + "n" * 400
    headers = {"x-request-id": f"id-{number}", f"x-{number}": name, "x-session-id": name, "user-agent": name}
    for model in ("fake-model", name):
        await world.client.post(CHAT, json={"model": model, "messages": [], "user": name}, headers=headers)
    await world.client.get(f"/v1/models/{name}", headers=headers)
    await world.client.get(f"/v1/{name}?{name}", headers=headers)
    await world.client.request(f"M{number}", CHAT, headers=headers)


def _series(page: str) -> set[str]:
    return {line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", CHAT, 405),
        ("PUT", CHAT, 405),
        ("HEAD", CHAT, 405),
        ("POST", "/v1/unknown", 404),
        ("GET", "/", 404),
        ("POST", "/v1/../admin/v1/backends", 404),
        ("POST", "/%2e%2e/admin", 400),
    ],
)
async def test_wrong_paths_and_methods_are_json_errors(method: str, path: str, status: int) -> None:
    """B42: 405 says what is allowed, 404 and 400 are OpenAI-shaped too."""
    async with GatewayWorld() as world:
        answer = await world.client.request(method, path)
        assert answer.status_code == status
        if method != "HEAD":
            assert answer.json()["error"]["message"]
        if status == 405:
            assert answer.headers["allow"] == "POST, OPTIONS"


@pytest.mark.parametrize("path", [CHAT + "/", "//v1/chat/completions", "/v1//chat/completions"])
async def test_sloppy_slashes_are_forgiven(path: str) -> None:
    """B42: repeated and trailing slashes lead to the path meant, and the backend sees it clean."""
    async with GatewayWorld() as world:
        url = f"{world.base_url}{path}"
        answer = await world.client.post(
            url, json={"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]}
        )
        assert answer.status_code == 200
        assert [one.target for backend in world.backends for one in backend.requests] == [CHAT]


async def test_oversize_bodies_are_413() -> None:
    """One byte more than the limit is refused, declared or chunked."""
    async with GatewayWorld(downstream={"max_body_bytes": 1000}) as world:
        padding = "x" * 1000
        body = json.dumps({"model": "fake-model", "messages": [], "padding": padding}).encode()
        declared = await world.client.post(CHAT, content=body)
        assert (declared.status_code, declared.json()["error"]["code"]) == (413, "request_too_large")

        async def pieces() -> Any:
            yield body

        chunked = await world.client.post(CHAT, content=pieces())
        assert chunked.status_code == 413


async def test_anthropic_errors_have_their_own_shape() -> None:
    """An error on /v1/messages is an Anthropic error."""
    async with GatewayWorld() as world:
        answer = await world.client.post("/v1/messages", json={"model": "fake-model"})
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"


async def test_a_hostile_request_id_is_replaced() -> None:
    """A request id that is not plain is not echoed and not forwarded; a plain one is echoed."""
    async with GatewayWorld() as world:
        plain = await world.chat(headers={"x-request-id": "my-id-1"})
        assert plain.headers["x-request-id"] == "my-id-1"
        hostile = await world.chat(headers={"x-request-id": "${jndi:ldap://x} " + "a" * 300})
        assert hostile.headers["x-request-id"].startswith("req-")
        seen = [one.header("x-request-id") for backend in world.backends for one in backend.requests]
        assert hostile.headers["x-request-id"] in seen


async def test_no_client_can_name_the_request_of_another_at_an_engine() -> None:
    """S06: engines mix up requests of one name. Two clients may send the same id."""
    async with GatewayWorld(1) as world:
        answers = [await world.chat(headers={"x-request-id": given}) for given in ("mine", "mine", "m" * 128)]
        answers += [await world.chat(), await world.chat()]
        told = [one.headers["x-request-id"] for one in answers]
        sent = [one.header("x-request-id") or "" for one in world.backends[0].requests]
        assert told[:3] == ["mine", "mine", "m" * 128]
        assert told[3:] == sent[3:]
        assert all(
            re.fullmatch(rf"{given}-req-[0-9a-f]{{32}}", one)
            for given, one in zip(("mine", "mine", "m" * 64), sent, strict=False)
        )
        assert all(re.fullmatch(r"req-[0-9a-f]{32}", one) for one in sent[3:])
        assert len({one[-32:] for one in sent} | {one[-32:-16] for one in sent}) == 2 * len(sent)
