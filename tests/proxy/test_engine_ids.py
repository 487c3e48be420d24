"""Ids that engines hand out: they lead to their maker, on every replica, and stay within their tenant."""

from __future__ import annotations

import collections
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.backend import respond
from fakes.gateway_world import GatewayWorld
from fakes.object_engine import ObjectEngine, object_engines
from fakes.redis_server import RedisProcess, redis_server, require_redis_server

KEYS = {"a": "key-of-tenant-a-0001", "b": "key-of-tenant-b-0002", "c": "key-of-tenant-c-0003"}
TENANTS: list[dict[str, Any]] = [
    {"name": "a", "keys_env": "KEY_A"},
    {"name": "b", "keys_env": "KEY_B"},
    {"name": "c", "keys_env": "KEY_C", "models": ["fake-model"]},
]
ENVIRON = {f"KEY_{name.upper()}": key for name, key in KEYS.items()}
FORM = {"content-type": "multipart/form-data; boundary=x"}


def as_tenant(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


@asynccontextmanager
async def world_of(count: int = 3, **options: Any) -> AsyncIterator[tuple[GatewayWorld, list[ObjectEngine]]]:
    engines = object_engines(count)
    async with GatewayWorld(count, **options) as world:
        for backend, engine in zip(world.backends, engines, strict=True):
            backend.default = engine.answer
        yield world, engines


def with_tenants(count: int = 3, **options: Any) -> Any:
    return world_of(count, environ=ENVIRON, tenants=TENANTS, **options)


async def upload(
    world: GatewayWorld, text: str = "x", *, at: int = 0, headers: dict[str, str] | None = None
) -> str:
    content: str = f"--x\r\ncontent-disposition: form-data; name=file\r\n\r\n{text}\r\n--x--\r\n"
    answer = await world.clients[at].post("/v1/files", content=content, headers=(headers or {}) | FORM)
    assert answer.status_code == 200, answer.text
    made: str = answer.json()["id"]
    return made


def maker_of(object_id: str) -> str:
    return object_id.split("-")[1]


def all_ids(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [one["id"] for one in answer.json()["data"]]


async def test_a_file_is_read_where_it_was_uploaded() -> None:
    """Each time, its content too; the metrics count small requests that bind nothing."""
    async with world_of() as (world, engines):
        files = [await upload(world, f"text {number}") for number in range(9)]
        assert len({maker_of(file) for file in files}) > 1
        for file in files:
            for path in (f"/v1/files/{file}", f"/v1/files/{file}/content"):
                answer = await world.client.get(path)
                assert (answer.status_code, answer.headers["x-homing-backend"]) == (200, maker_of(file))
        assert sum(len(engine.asked) for engine in engines) == 3 * 9
        assert {labels[0] for labels in world.gateway.metrics.requests} == {"objects"}
        assert await world.gateway.sessions.count_by_backend() == {}
        world.assert_idle()


async def test_a_batch_runs_where_its_file_is_and_so_does_its_output() -> None:
    """Made, looked at, cancelled, and the file that it has brought forth."""
    async with with_tenants() as (world, _):
        for _ in range(6):
            file = await upload(world, headers=as_tenant("a"))
            body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            made = await world.client.post("/v1/batches", json=body, headers=as_tenant("a"))
            assert maker_of(made.json()["id"]) == maker_of(file)
            path = f"/v1/batches/{made.json()['id']}"
            done = await world.client.get(path, headers=as_tenant("a"))
            output = done.json()["output_file_id"]
            for method, target in (("GET", f"/v1/files/{output}/content"), ("POST", f"{path}/cancel")):
                answer = await world.client.request(method, target, headers=as_tenant("a"))
                assert answer.status_code == 200
                assert (await world.client.request(method, target, headers=as_tenant("b"))).status_code == 404


async def test_an_upload_in_parts_ends_as_a_file_of_its_maker() -> None:
    """The answer to `complete` names the file inside."""
    async with with_tenants() as (world, _):
        made = await world.client.post("/v1/uploads", json={"bytes": 2}, headers=as_tenant("a"))
        path = f"/v1/uploads/{made.json()['id']}"
        part = await world.client.post(f"{path}/parts", content=b"--x--", headers=as_tenant("a") | FORM)
        done = await world.client.post(f"{path}/complete", json={"part_ids": []}, headers=as_tenant("a"))
        assert (part.status_code, done.status_code) == (200, 200)
        file = done.json()["file"]["id"]
        assert maker_of(file) == maker_of(made.json()["id"])
        assert (await world.client.get(f"/v1/files/{file}", headers=as_tenant("a"))).status_code == 200


@pytest.mark.parametrize("is_object", [False, True])
async def test_a_response_goes_where_its_conversation_is(is_object: bool) -> None:
    """As a string and as an object; a busy maker is no reason to ask another."""
    async with world_of() as (world, _):
        for _ in range(6):
            made = (await world.client.post("/v1/conversations", json={})).json()["id"]
            body = {"model": "fake-model", "input": "x", "conversation": {"id": made} if is_object else made}
            for _ in range(2):
                answer = await world.client.post("/v1/responses", json=body)
                assert (answer.status_code, answer.headers["x-homing-backend"]) == (200, maker_of(made))
            items = await world.client.get(f"/v1/conversations/{made}/items")
            assert items.headers["x-homing-backend"] == maker_of(made)


def naming(file: str) -> list[tuple[str, dict[str, Any]]]:
    """Every place where a body may name a file."""
    chat = {"type": "file", "file": {"file_id": file}}
    part = {"type": "input_file", "file_id": file}
    source = {"type": "document", "source": {"type": "file", "file_id": file}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [source]}
    request = {"model": "fake-model", "max_tokens": 1}
    messages = [{"role": "user", "content": [source]}]
    return [
        ("/v1/chat/completions", {**request, "messages": [{"role": "user", "content": [chat]}]}),
        ("/v1/responses", {"model": "fake-model", "input": [{"role": "user", "content": [part]}]}),
        ("/v1/responses", {"model": "fake-model", "input": [{"type": "x", "output": part}]}),
        ("/v1/messages", {**request, "messages": messages}),
        ("/v1/messages", {**request, "messages": [{"role": "user", "content": [result]}]}),
        ("/v1/conversations", {"items": [{"role": "user", "content": [part]}]}),
        ("/v1/messages/batches", {"requests": [{"custom_id": "1", "params": {"messages": messages}}]}),
        ("/v1/batches", {"input_file_id": file}),
    ]


async def test_a_body_that_names_a_file_goes_to_its_maker_and_to_its_tenant_only() -> None:
    """In every dialect, however the name is spelled; the session goes where its file is, and stays."""
    async with with_tenants() as (world, engines):
        for number in range(4):
            file = await upload(world, headers=as_tenant("a"))
            for path, body in naming(file):
                headers = {"x-session-id": f"s-{number}", **as_tenant("a")}
                answer = await world.client.post(path, json=body, headers=headers)
                assert (answer.status_code, answer.headers["x-homing-backend"]) == (200, maker_of(file)), path
                asked = sum(len(engine.asked) for engine in engines)
                spelled = json.dumps(body).replace("input_file_id", "input_\\u0066ile_id")
                for content in (json.dumps(body), spelled.replace('"file_id"', '"fil\\u0065_id"')):
                    stolen = await world.client.post(path, content=content, headers=as_tenant("b"))
                    assert stolen.status_code == 404, path
                assert sum(len(engine.asked) for engine in engines) == asked


async def test_a_file_in_a_long_conversation_is_found_at_every_turn() -> None:
    """What is remembered of a conversation hides no file in it, whenever it came."""
    async with with_tenants() as (world, _):
        file = await upload(world, headers=as_tenant("a"))
        messages: list[dict[str, Any]] = [{"role": "user", "content": "long " * 4_000}]
        for turn in range(5):
            if turn == 2:
                part = {"type": "file", "file": {"file_id": file}}
                messages.append({"role": "user", "content": [part]})
            answer = await world.chat("s", messages=messages, headers=as_tenant("a"))
            assert answer.status_code == 200
            if turn >= 2:
                assert answer.headers["x-homing-backend"] == maker_of(file)
                refused = await world.chat("s", messages=messages, headers=as_tenant("b"))
                assert refused.status_code == 404
            messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"turn {turn}"}]


async def test_a_tools_own_arguments_are_not_taken_for_files() -> None:
    """A tool may have a parameter of that name; its value is the client's business."""
    arguments = {"file_id": "F1", "content": {"file_id": "F2"}}
    call = {"type": "tool_use", "id": "t", "name": "read", "input": arguments}
    async with with_tenants() as (world, _):
        messages = [
            {"role": "user", "content": "read it"},
            {"role": "assistant", "content": [call]},
            {"role": "tool", "tool_call_id": "t", "content": '"file_id": "F1"'},
        ]
        assert (await world.chat("s", messages=messages, headers=as_tenant("b"))).status_code == 200


async def test_another_tenants_id_is_an_id_that_never_was() -> None:
    """Same status, same words, and no engine is asked; for ids that are odd or too long as well."""
    async with with_tenants() as (world, engines):
        file = await upload(world, headers=as_tenant("a"))
        conversation = (await world.client.post("/v1/conversations", headers=as_tenant("a"))).json()["id"]
        batch = (
            await world.client.post("/v1/messages/batches", json={"requests": []}, headers=as_tenant("a"))
        ).json()["id"]
        asked = sum(len(engine.asked) for engine in engines)
        for path in (
            f"/v1/files/{file}",
            f"/v1/files/{file}/content",
            f"/v1/conversations/{conversation}",
            f"/v1/conversations/{conversation}/items",
            f"/v1/messages/batches/{batch}",
            f"/v1/batches/{file}",  # of another kind
        ):
            stolen = await world.client.get(path, headers=as_tenant("b"))
            unknown = await world.client.get(path.replace("-b", "-x"), headers=as_tenant("b"))
            assert (stolen.status_code, stolen.content) == (404, unknown.content), path
        for object_id in ("a.b", "a" * 257, "%41", "ä"):
            odd = await world.client.get(f"/v1/files/{object_id}", headers=as_tenant("b"))
            assert odd.status_code == 404, object_id
        for value in (conversation, {"id": conversation}, " " + conversation, "x" * 300):
            body = {"model": "fake-model", "input": "x", "conversation": value}
            stolen = await world.client.post("/v1/responses", json=body, headers=as_tenant("b"))
            assert stolen.status_code == 404
        for value in ("resp_1", "x" * 300, "null", "\u0000"):
            body = {"model": "fake-model", "input": "x", "previous_response_id": value}
            stolen = await world.client.post("/v1/responses", json=body, headers=as_tenant("b"))
            assert stolen.status_code == 404, value
        assert sum(len(engine.asked) for engine in engines) == asked
        assert (await world.client.delete(f"/v1/files/{file}", headers=as_tenant("b"))).status_code == 404
        assert (await world.client.get(f"/v1/files/{file}", headers=as_tenant("a"))).status_code == 200
        error = (await world.client.get(f"/v1/messages/batches/{batch}", headers=as_tenant("b"))).json()
        assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")


async def test_nothing_is_learned_from_what_a_client_has_stored() -> None:
    """A file whose content says that it is somebody else's."""
    async with with_tenants(1) as (world, engines):
        file = await upload(world, headers=as_tenant("a"))
        own = await upload(world, headers=as_tenant("b"))
        engines[0].objects["files"][own]["content"] = f'{{"id": "{file}", "object": "file"}}'
        read = await world.client.get(f"/v1/files/{own}/content", headers=as_tenant("b"))
        assert read.json()["id"] == file
        assert (await world.client.get(f"/v1/files/{file}", headers=as_tenant("b"))).status_code == 404


async def test_a_batch_is_nothing_for_a_tenant_that_may_use_some_models_only() -> None:
    """The models in it are out of sight; files and conversations are no matter of models."""
    async with with_tenants() as (world, _):
        file = await upload(world, headers=as_tenant("c"))
        refused = await world.client.post("/v1/batches", json={"input_file_id": file}, headers=as_tenant("c"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert (await world.client.get(f"/v1/files/{file}", headers=as_tenant("c"))).status_code == 200


async def test_a_file_whose_content_looks_like_an_error_is_no_failure() -> None:
    """Nor tries another backend."""
    content = b'{"error":{"message":"died","code":500}}'
    async with world_of() as (world, engines):
        file = await upload(world)
        engines[int(maker_of(file)[1:])].objects["files"][file]["content"] = content.decode()
        answer = await world.client.get(f"/v1/files/{file}/content")
        assert (answer.status_code, answer.content) == (200, content)
        assert not world.gateway.metrics.upstream_errors


async def test_without_tenants_an_id_from_before_a_restart_is_found() -> None:
    """The backends are asked in turn, and the next time the one that has it; a 404 of all is a 404."""
    async with world_of() as (world, engines):
        for number, engine in enumerate(engines):
            old: dict[str, Any] = {"id": f"old-{number}", "created_at": 0, "content": "x"}
            engine.objects["files"] = {old["id"]: old}
        for number in range(3):
            for _ in range(2):
                answer = await world.client.get(f"/v1/files/old-{number}")
                assert (answer.status_code, answer.headers["x-homing-backend"]) == (200, f"b{number}")
            num_asked = [len(engine.asked) for engine in engines]
            assert (await world.client.get(f"/v1/files/old-{number}/content")).status_code == 200
            assert sum(len(engine.asked) for engine in engines) == sum(num_asked) + 1
            made = await world.client.post("/v1/batches", json={"input_file_id": f"old-{number}"})
            assert maker_of(made.json()["id"]) == f"b{number}"
            assert (await world.client.delete(f"/v1/files/old-{number}")).status_code == 200
        before = [len(engine.asked) for engine in engines]
        assert (await world.client.get("/v1/files/never")).status_code == 404
        assert [len(engine.asked) for engine in engines] == [count + 1 for count in before]
        assert not world.gateway.metrics.retries
        assert not world.gateway.metrics.upstream_errors
        world.assert_idle()


async def test_a_maker_that_is_down_is_named_as_the_reason() -> None:
    """No other engine answers for it: 503 while it is down, 404 once it has left."""
    async with world_of() as (world, engines):
        file = await upload(world)
        maker = int(maker_of(file)[1:])
        body = naming(file)[0][1]
        await world.backends[maker].stop()
        first = await world.client.get(f"/v1/files/{file}")
        assert first.status_code in (502, 503)
        await world.wait_for(lambda: world.state(maker) == "down")
        before = [len(engine.asked) for engine in engines]
        for answer in (
            await world.client.get(f"/v1/files/{file}"),
            await world.client.delete(f"/v1/files/{file}"),
            await world.client.post("/v1/batches", json={"input_file_id": file}),
            await world.client.post("/v1/chat/completions", json=body),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_backend_available")
        assert [len(engine.asked) for engine in engines] == before
        await world.admin.delete(f"/admin/v1/backends/b{maker}?force=true")
        await world.wait_for(lambda: world.state(maker) == "removed")
        assert (await world.client.get(f"/v1/files/{file}")).status_code == 404
        world.assert_idle()


async def test_objects_at_two_makers_cannot_meet() -> None:
    """The refusal says why."""
    async with world_of() as (world, _):
        files: dict[str, str] = {}
        while len(files) < 2:
            file = await upload(world)
            files[maker_of(file)] = file
        parts = [{"type": "input_file", "file_id": file} for file in files.values()]
        body = {"model": "fake-model", "input": [{"role": "user", "content": parts}]}
        answer = await world.client.post("/v1/responses", json=body)
        assert (answer.status_code, "different backends" in answer.text) == (400, True)


async def test_lists_are_joined_and_paged() -> None:
    """Newest first, over all backends and their own pages; every object once, forwards and backwards."""
    async with world_of() as (world, engines):
        made = [await upload(world) for _ in range(25)]
        engines[0].page_size = 2
        assert all_ids(await world.client.get("/v1/files?limit=100")) == made[::-1]
        assert all_ids(await world.client.get("/v1/files?limit=100&order=asc")) == made
        seen: list[str] = []
        cursor = ""
        while True:
            answer = await world.client.get(f"/v1/files?limit=10{cursor}")
            page = answer.json()
            seen += all_ids(answer)
            assert (page["object"], page["first_id"]) == ("list", page["data"][0]["id"])
            cursor = f"&after={page['last_id']}"
            if not page["has_more"]:
                break
        assert seen == made[::-1]
        before = await world.client.get(f"/v1/files?limit=3&before={made[4]}")
        assert all_ids(before) == [made[7], made[6], made[5]]
        for query in ("limit=0", "limit=x", "order=up", "after=never"):
            assert (await world.client.get(f"/v1/files?{query}")).status_code == 400
        assert {labels[0] for labels in world.gateway.metrics.requests} == {"objects"}


async def test_a_list_has_a_tenants_own_objects_only() -> None:
    """And what a batch in it has brought forth can be read."""
    async with with_tenants() as (world, engines):
        own: dict[str, list[str]] = collections.defaultdict(list)
        for number in range(12):
            name = "ab"[number % 2]
            own[name].append(await upload(world, headers=as_tenant(name)))
        for name in ("a", "b"):
            listed = await world.client.get("/v1/files?limit=4", headers=as_tenant(name))
            assert (all_ids(listed), listed.json()["has_more"]) == (own[name][:1:-1], True)
            rest = await world.client.get(
                f"/v1/files?after={listed.json()['last_id']}", headers=as_tenant(name)
            )
            assert (all_ids(rest), rest.json()["has_more"]) == (own[name][1::-1], False)
        foreign = await world.client.get(f"/v1/files?after={own['a'][0]}", headers=as_tenant("b"))
        never = await world.client.get("/v1/files?after=never", headers=as_tenant("b"))
        assert (foreign.status_code, foreign.content) == (400, never.content)
        file = own["a"][0]
        batch = await world.client.post("/v1/batches", json={"input_file_id": file}, headers=as_tenant("a"))
        engine = engines[int(maker_of(file)[1:])]
        engine.objects["batches"][batch.json()["id"]]["output_file_id"] = "file-out"
        engine.objects["files"]["file-out"] = {"id": "file-out", "created_at": 0, "content": "x"}
        assert (await world.client.get("/v1/files/file-out", headers=as_tenant("a"))).status_code == 404
        await world.client.get("/v1/batches", headers=as_tenant("a"))
        assert (await world.client.get("/v1/files/file-out", headers=as_tenant("a"))).status_code == 200
        assert all_ids(await world.client.get("/v1/batches", headers=as_tenant("b"))) == []
        assert (await world.client.get("/v1/files")).status_code == 401


async def test_one_failing_backend_does_not_fail_a_list() -> None:
    """It is named in a header; a backend without that API is no failure; none at all is one."""
    async with world_of() as (world, _):
        made = [await upload(world) for _ in range(9)]
        world.backends[1].default = respond(b"oops", status=500)
        listed = await world.client.get("/v1/files")
        assert listed.headers["x-homing-incomplete"] == "b1"
        assert all_ids(listed) == [file for file in made[::-1] if maker_of(file) != "b1"]
        world.backends[1].default = respond(b"{}", status=404)
        assert "x-homing-incomplete" not in (await world.client.get("/v1/files")).headers
        for backend in world.backends:
            backend.default = respond(b"{}", status=404)
        assert (await world.client.get("/v1/batches")).status_code == 404
        world.backends[0].default = respond(b"not a list")
        assert (await world.client.get("/v1/batches")).status_code == 503
        anthropic = (await world.client.get("/v1/messages/batches")).json()
        assert anthropic["type"] == "error"


async def test_a_list_counts_against_its_tenants_limit() -> None:
    """As one request."""
    limited = [{"name": "a", "keys_env": "KEY_A", "limits": {"requests_per_minute": 2}}]
    async with world_of(1, environ=ENVIRON, tenants=limited) as (world, _):
        statuses = [
            (await world.client.get("/v1/files", headers=as_tenant("a"))).status_code for _ in range(3)
        ]
        assert statuses == [200, 200, 429]


async def test_a_deleted_file_is_forgotten() -> None:
    """With tenants its id is then unknown to the gateway too."""
    async with with_tenants() as (world, engines):
        file = await upload(world, headers=as_tenant("a"))
        assert (await world.client.delete(f"/v1/files/{file}", headers=as_tenant("a"))).status_code == 200
        await world.chat("s", headers=as_tenant("a"))  # what requests leave behind is written
        world.gateway.ledger.drain()
        asked = sum(len(engine.asked) for engine in engines)
        assert (await world.client.get(f"/v1/files/{file}", headers=as_tenant("a"))).status_code == 404
        assert sum(len(engine.asked) for engine in engines) == asked


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    require_redis_server()
    with redis_server(tmp_path) as process:
        yield process


@pytest.mark.redis
async def test_an_id_leads_to_its_maker_on_every_replica(redis: RedisProcess) -> None:
    """At once after the answer, within its tenant, in lists too; for far longer than a session."""
    store = {"url": redis.url, "budget_ms": 1000, "breaker_failures": 10}
    options: dict[str, Any] = {"num_gateways": 2, "sessions": {"store": "redis", "redis": store, "ttl_s": 60}}
    async with with_tenants(**options) as (world, _):
        made = [await upload(world, at=number % 2, headers=as_tenant("a")) for number in range(8)]
        for number, file in enumerate(made):
            other = world.clients[(number + 1) % 2]
            answer = await other.get(f"/v1/files/{file}", headers=as_tenant("a"))
            assert (answer.status_code, answer.headers["x-homing-backend"]) == (200, maker_of(file))
            assert (await other.get(f"/v1/files/{file}", headers=as_tenant("b"))).status_code == 404
        for client in world.clients:
            assert all_ids(await client.get("/v1/files", headers=as_tenant("a"))) == made[::-1]
            assert all_ids(await client.get("/v1/files", headers=as_tenant("b"))) == []
        keys = [key for key in redis.ask("KEYS", "homing:objects:*:s:*").split() if b":s:" in key]
        assert len(keys) == 8
        ttls = [int(redis.ask("TTL", key.decode()).strip(b":\r\n")) for key in keys]
        assert min(ttls) > 86_400
        assert await world.gateway.sessions.count_by_backend() == {}
