"""Tenants on the wire: who gets in, what each may see, and that they never meet."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import backend as fake
from fakes.gateway_world import GatewayWorld
from fakes.redis_server import RedisProcess, redis_server, require_redis_server

from gateway.values import BackendId

KEYS = {"a": "key-of-tenant-a-0001", "b": "key-of-tenant-b-0001"}
ENVIRON = {"A_KEYS": KEYS["a"], "B_KEYS": KEYS["b"], "BACKEND_KEY": "key-of-the-backend"}
HELLO = [{"role": "user", "content": "hello"}]


def as_tenant(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def tenants(**rules: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": "a", "keys_env": "A_KEYS", **rules.get("a", {})},
        {"name": "b", "keys_env": "B_KEYS", **rules.get("b", {})},
    ]


@contextlib.asynccontextmanager
async def two_tenants(num_backends: int = 2, **config: Any) -> AsyncIterator[GatewayWorld]:
    config.setdefault("tenants", tenants())
    async with GatewayWorld(num_backends, environ=ENVIRON, **config) as world:
        yield world


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    require_redis_server()
    with redis_server(tmp_path) as process:
        yield process


def as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def received(world: GatewayWorld) -> list[fake.ReceivedRequest]:
    return [request for backend in world.backends for request in backend.requests]


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong-key-wrong-key"}, {"x-api-key": "wrong"}]
)
async def test_nobody_gets_in_without_a_key(headers: dict[str, str]) -> None:
    """401 in each dialect, before a byte of the body is asked for; health stays open; it is counted."""
    async with two_tenants() as world:
        openai = await world.chat("s", headers=headers)
        assert (openai.status_code, openai.json()["error"]["code"]) == (401, "invalid_api_key")
        assert openai.headers["www-authenticate"] == "Bearer"
        assert openai.headers["x-should-retry"] == "false"
        claude = await world.client.post(
            "/v1/messages", json={"model": "m", "max_tokens": 1, "messages": HELLO}, headers=headers
        )
        assert (claude.status_code, claude.json()["error"]["type"]) == (401, "authentication_error")
        assert (await world.client.get("/v1/models", headers=headers)).status_code == 401
        assert (await world.client.get("/health")).status_code == 200
        assert not received(world)
        assert 'api="chat",status="401"' in (await world.client.get("/metrics")).text
        world.assert_idle()


async def test_a_key_of_either_header_gets_in_and_goes_no_further() -> None:
    """The backend sees its own key, or none; never the client's."""
    async with two_tenants() as world:
        for headers in (as_tenant("a"), {"x-api-key": KEYS["b"]}):
            assert (await world.chat("s", headers=headers)).status_code == 200
        for request in received(world):
            assert request.header("authorization") is None
            assert request.header("x-api-key") is None


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer sk-ant-oat01-foreign", "x-api-key": KEYS["a"]}, 200),
        ({"authorization": f"Bearer {KEYS['a']}", "x-api-key": "sk-ant-api03-foreign"}, 200),
        ({"authorization": "Basic dXNlcjpmb3JlaWdu", "x-api-key": KEYS["a"]}, 200),
        ({"authorization": "Bearer", "x-api-key": KEYS["a"]}, 200),
        ({"api-key": KEYS["a"]}, 200),
        ({"authorization": "Bearer sk-foreign-foreign", "api-key": KEYS["a"]}, 200),
        ({"authorization": b"Bearer \xff\xfe-foreign", "x-api-key": KEYS["a"]}, 200),
        ({"authorization": "Bearer sk-ant-oat01-foreign", "x-api-key": "sk-foreign-foreign"}, 401),
        ({"authorization": b"Bearer \xff\xfe-foreign"}, 401),
        ({"authorization": b"Bearer eyJ\xff.eyJ\xfe.foreign"}, 401),
    ],
)
@pytest.mark.parametrize("passes_client_key", [False, True])
async def test_a_foreign_token_beside_a_key_is_ignored(
    headers: dict[str, str | bytes], status: int, passes_client_key: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """N07, S07: agents send their vendor's login too. That is no mistake; neither engines nor logs see it."""
    options = {"authentication": {"passes_client_key": passes_client_key}, "log": {"level": "debug"}}
    async with two_tenants(num_backends=1, **options) as world:
        body = {"model": "fake-model", "max_tokens": 5, "messages": HELLO}
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/models"):
            method = "GET" if path == "/v1/models" else "POST"
            given = [(name.encode(), as_bytes(value)) for name, value in headers.items()]
            request = world.client.build_request(method, path, json=body, headers=given)
            assert (await world.client.send(request)).status_code == status
        assert len(received(world)) == (2 if status == 200 else 0)
        for one in received(world):
            assert b"foreign" not in one.head
            assert (KEYS["a"].encode() in one.head) is passes_client_key
        world.assert_idle()
    assert "foreign" not in capfd.readouterr().err


async def test_the_backends_key_replaces_the_clients() -> None:
    """Checked here, replaced there."""
    async with GatewayWorld(1, environ=ENVIRON, tenants=tenants()) as world:
        settings = world.gateway.config.backends[0]
        backend = world.gateway.fleet.view.backends[BackendId("b0")]
        world.gateway.fleet.add(backend, api_key=ENVIRON["BACKEND_KEY"])
        assert settings.api_key_env is None
        await world.chat("s", headers=as_tenant("a"))
        assert received(world)[0].header("authorization") == f"Bearer {ENVIRON['BACKEND_KEY']}"


async def test_the_clients_key_passes_on_if_so_configured_or_if_nobody_asks() -> None:
    """`passes_client_key`, and a gateway without tenants."""
    async with two_tenants(authentication={"passes_client_key": True}) as world:
        await world.chat("s", headers=as_tenant("a"))
        assert received(world)[0].header("authorization") == f"Bearer {KEYS['a']}"
    async with GatewayWorld() as world:
        await world.chat("s", headers={"authorization": "Bearer anything"})
        assert received(world)[0].header("authorization") == "Bearer anything"


async def test_the_same_session_id_of_two_tenants_is_two_sessions() -> None:
    """Neither meets the other's binding, and both are kept."""
    async with two_tenants() as world:
        for name in ("a", "b"):
            first = await world.chat("same", headers=as_tenant(name))
            assert first.headers["x-homing-affinity"] == "new"
        for name in ("a", "b"):
            second = await world.chat("same", headers=as_tenant(name))
            assert second.headers["x-homing-affinity"] == "hit"


async def test_stored_answers_are_their_tenants_own() -> None:
    """By id, and as `previous_response_id`: another tenant's looks like one that never was."""
    answer = fake.respond(b'{"id":"resp_1","object":"response","status":"completed"}')
    async with two_tenants(num_backends=1) as world:
        world.backends[0].default = answer
        made = await world.client.post(
            "/v1/responses", json={"model": "fake-model", "input": "x"}, headers=as_tenant("a")
        )
        assert made.status_code == 200
        follow = {"model": "fake-model", "input": "y", "previous_response_id": "resp_1"}
        async with asyncio.timeout(5):  # the binding is written in the background
            while (await world.client.get("/v1/responses/resp_1", headers=as_tenant("a"))).status_code != 200:
                await asyncio.sleep(0.01)
        before = len(received(world))
        for refused in (
            await world.client.get("/v1/responses/resp_1", headers=as_tenant("b")),
            await world.client.delete("/v1/responses/resp_1", headers=as_tenant("b")),
            await world.client.post("/v1/responses", json=follow, headers=as_tenant("b")),
            await world.client.post(
                "/v1/responses", json=follow, headers={**as_tenant("b"), "x-session-id": "own"}
            ),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        assert len(received(world)) == before
        own = await world.client.post("/v1/responses", json=follow, headers=as_tenant("a"))
        assert own.status_code == 200


async def test_a_tenant_sees_and_uses_only_its_models() -> None:
    """Others do not exist for it: not in the list, not by name, not in a request, nor when none is named."""
    async with two_tenants(tenants=tenants(a={"models": ["other-model"]})) as world:
        listed = await world.client.get("/v1/models", headers=as_tenant("b"))
        assert [card["id"] for card in listed.json()["data"]] == ["fake-model"]
        assert (await world.client.get("/v1/models", headers=as_tenant("a"))).json()["data"] == []
        for refused in (
            await world.client.get("/v1/models/fake-model", headers=as_tenant("a")),
            await world.chat("s", headers=as_tenant("a")),
            await world.client.post("/generate", json={"text": "x"}, headers=as_tenant("a")),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert (await world.chat("s", headers=as_tenant("b"))).status_code == 200
        assert len(received(world)) == 1


async def test_each_tenant_has_limits_of_its_own() -> None:
    """One is refused, the other goes on; a priority tenant overtakes in the queue."""
    rules = tenants(a={"limits": {"requests_per_minute": 1}}, b={"priority": 1})
    async with two_tenants(tenants=rules) as world:
        statuses = [(await world.chat("s", headers=as_tenant("a"))).status_code for _ in range(2)]
        assert statuses == [200, 429]
        answers = [await world.chat("s", headers=as_tenant("b")) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert "x-ratelimit-limit-requests" not in answers[0].headers


async def test_a_tenant_with_priority_is_served_first() -> None:
    """Both wait for the one place; b came later and is next."""
    async with two_tenants(
        num_backends=1, tenants=tenants(b={"priority": 1}), limits={"max_in_flight": 1}
    ) as world:
        gate = asyncio.Event()

        async def gated(turn: fake.Turn) -> None:
            await gate.wait()
            await fake.openai_answer()(turn)

        world.backends[0].default = gated
        tasks: list[asyncio.Task[httpx.Response]] = []
        for number, name in enumerate(("a", "a", "b")):
            chat = world.chat(f"s{number}", text=f"{name}{number}", headers=as_tenant(name))
            tasks.append(asyncio.ensure_future(chat))
            await world.wait_for(lambda: world.gateway.proxy.num_in_flight == len(tasks))
        await world.wait_for(lambda: world.gateway.admission.room.num_waiting == 2)
        gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * 3
        order = [request.json["messages"][0]["content"] for request in received(world)]
        assert order == ["a0", "b2", "a1"]


async def test_salts_keep_tenants_apart_and_are_not_the_clients_to_choose() -> None:
    """Each tenant's requests carry its own salt, whatever they say; length and all else are right."""
    async with two_tenants(num_backends=1, authentication={"cache_salt": True}) as world:
        for name in ("a", "b", "a"):
            answer = await world.chat("s", headers=as_tenant(name), cache_salt="stolen", stream=name == "b")
            assert answer.status_code == 200
        sent = [request.json for request in received(world)]
        salts = [body.pop("cache_salt") for body in sent]
        assert salts[0] == salts[2] != salts[1]
        assert "stolen" not in salts
        assert sent[0]["messages"] == [{"role": "user", "content": "hi"}]
        zipped = await world.client.post(
            "/v1/chat/completions",
            content=gzip.compress(json.dumps({"model": "fake-model", "messages": HELLO}).encode()),
            headers={**as_tenant("a"), "content-encoding": "gzip", "content-type": "application/json"},
        )
        assert zipped.status_code == 415
        assert len(received(world)) == 3
        world.assert_idle()


@pytest.mark.parametrize(
    ("path", "member"),
    [
        ("/v1/chat/completions", '"request_id": "r-1"'),
        ("/v1/completions", '"request\\u005fid": "r-1"'),
        ("/v1/embeddings", '"request_id": "r-1"'),
        ("/v1/responses", '"request_id": "resp_1"'),
        ("/v1/messages", '"rid": "r-1"'),
        ("/v1/chat/completions", f'"rid": "r-1", "metadata": {{"x": "{"x" * 2_000_000}"}}'),
        ("/generate", '"rid": ["r-1"]'),
        ("/abort_request", '"rid": "r-1"'),
        ("/abort_request", '"rid": "r-1", "x": NaN'),
    ],
)
async def test_no_body_names_a_request_at_its_engine(path: str, member: str) -> None:
    """S06: another tenant's request may have that name. An unset name is none; without tenants it passes.

    On a passed-through path nor may one that cannot be read here.
    """
    members = f'"model": "fake-model", "prompt": "x", "input": "x", "messages": {json.dumps(HELLO)}, {member}'
    body = f" {{{members}}}"
    unset = '{"model": "fake-model", "prompt": "x", "request_id": null, "rid": null}'
    headers = {"content-type": "application/json", **as_tenant("a")}
    async with two_tenants(passthrough_paths=["/abort_request"]) as world:
        refused = await world.client.post(path, content=body, headers=headers)
        taken = await world.client.post("/v1/completions", content=unset, headers=headers)
        assert (refused.status_code, taken.status_code) == (400, 200)
        assert "x-request-id" in refused.json()["error"]["message"]
        assert len(received(world)) == 1
    async with GatewayWorld(passthrough_paths=["/abort_request"]) as world:
        assert (await world.client.post(path, content=body, headers=headers)).status_code == 200


async def test_without_the_option_bodies_stay_as_received() -> None:
    """Byte for byte."""
    body = b'{ "model":"fake-model",  "messages":[{"role":"user","content":"x"}],"cache_salt":"own" }'
    async with two_tenants() as world:
        await world.client.post("/v1/chat/completions", content=body, headers=as_tenant("a"))
        assert received(world)[0].body == body


@pytest.mark.redis
async def test_keys_in_redis_are_added_and_revoked_without_a_restart(redis: RedisProcess) -> None:
    """An operator's HSET lets a key in; the gateways ask again after the time that is configured."""
    settings = {"store": "redis", "redis": {"url": redis.url, "budget_ms": 1000}}
    async with two_tenants(
        sessions=settings, authentication={"keys_in_redis": True, "keys_in_redis_ttl_s": 0.01}
    ) as world:
        headers = {"authorization": "Bearer key-added-later-01"}
        assert (await world.chat("s", headers=headers)).status_code == 401
        digest = hashlib.sha256(b"key-added-later-01").hexdigest()
        redis.ask("HSET", "homing:{00}:api_keys", digest, "a")
        assert (await world.chat("s", headers=headers)).status_code == 200
        redis.ask("HSET", "homing:{00}:api_keys", digest, "nobody")
        await asyncio.sleep(0.02)
        assert (await world.chat("s", headers=headers)).status_code == 403
        redis.kill()
        assert (
            await world.chat("s", headers={"authorization": "Bearer key-never-seen-01"})
        ).status_code == 503
        assert (await world.chat("s", headers=as_tenant("a"))).status_code == 200


async def test_secrets_are_in_no_log_dump_or_page(capfd: pytest.CaptureFixture[str]) -> None:
    """Neither keys nor salts: in the access log, in the metrics, in the admin's view of the configuration."""
    async with two_tenants(
        authentication={"cache_salt": True}, log={"access": True, "level": "info"}
    ) as world:
        await world.chat("s", headers=as_tenant("a"))
        await world.chat("s", headers={"authorization": "Bearer wrong-key-wrong-key"})
        salt = str(received(world)[0].json["cache_salt"])
        told = (await world.client.get("/metrics")).text
        told += (await world.admin.get("/admin/v1/config")).text
    told += capfd.readouterr().err
    assert '"tenant":"a"' in told
    for secret in (KEYS["a"], "wrong-key-wrong-key", salt):
        assert secret not in told
