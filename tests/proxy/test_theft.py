"""Two tenants in front of a real worker: one tries to learn what the other has sent, in every way we know.

The measure is what the worker says that it found in its cache. Before each attempt the cache is empty, then
tenant a sends its secret once. Whatever tenant b sends must find nothing: 0 tokens, not few. Afterwards the
same request of tenant a finds the secret in the same dialect, so the attempt was a real one.
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from engine.worker_app import MODEL, Worker, running_worker
from fakes.gateway_world import GatewayWorld
from fakes.tiny_checkpoint import write_tiny_checkpoint
from proxy.thefts import (
    CHAT,
    CHOSEN_SALTS,
    DIALECTS,
    KEYS,
    MANY_TOKENS,
    REMOVED_SALTS,
    STOLEN,
    behind,
    cached_tokens,
    request,
)


class Theft(NamedTuple):
    """A gateway with its worker, as both tenants see it."""

    world: GatewayWorld
    worker: Worker
    tokens: list[int]  # of the secret as a chat
    salt: str  # of tenant a, should it ever leak

    async def post(
        self, tenant: str, path: str, content: bytes | AsyncIterator[bytes], **headers: str
    ) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        known = {"authorization": f"Bearer {KEYS[tenant]}", "content-type": "application/json"}
        return await self.world.client.post(path, content=content, headers={**known, **names})

    def request(self, dialect: str, **fields: Any) -> tuple[str, bytes]:
        return request(MODEL, self.tokens, dialect, **fields)

    async def warm(self) -> None:
        """Nothing is cached but tenant a's secret."""
        await self.worker.client.post("/v1/kv/clear")
        answer = await self.post("a", *self.request("chat"))
        assert cached_tokens(answer) == 0

    async def assert_still_there(self, dialect: str) -> None:
        """The same tokens, sent by tenant a in this dialect, are found."""
        assert cached_tokens(await self.post("a", *self.request(dialect))) > MANY_TOKENS, dialect


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def theft(checkpoint: Path) -> AsyncIterator[Theft]:
    async with running_worker(checkpoint, num_kv_blocks=2048) as worker:
        url = str(worker.client.make_url("/"))
        async with GatewayWorld(
            0,
            environ={"A": KEYS["a"], "B": KEYS["b"]},
            backends=[{"id": "w", "url": url, "engine": "torch"}],
            tenants=[{"name": "a", "keys_env": "A"}, {"name": "b", "keys_env": "B"}],
            authentication={"cache_salt": True},
            downstream={"max_inline_body_bytes": 200_000},
        ) as world:
            counted = await (await worker.client.post("/tokenize", json={"messages": CHAT})).json()
            directory = world.gateway.authentication.gatekeeper.directory
            salt = directory.named("a").cache_salt  # type: ignore[union-attr]  # None fails
            yield Theft(world, worker, counted["tokens"], str(salt))


async def in_chunks(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 100):
        yield data[start : start + 100]


CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity, gzip": gzip.compress,
    "x-unknown": bytes,
    "Identity": bytes,
}


OF_STORED_ANSWERS = (
    ("GET", ""),
    ("HEAD", ""),
    ("DELETE", ""),
    ("POST", "/cancel"),
    ("GET", "/input_items"),
)
OF_THE_WORKER = (
    *(f"/v1/kv/{name}" for name in ("explain", "tree", "inventory", "stats", "pins", "clear")),
    "/reset_prefix_cache",
    "/v1/%6bv/tree",
    "/V1/KV/tree",
    "/v1/realtime",
)
SPELLINGS = ("{}", "/{}", "{}/", "/v1/models/..{}", "/v1/chat/completions/../../..{}", "{}?x=/v1/models")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("way", CHOSEN_SALTS | REMOVED_SALTS)
async def test_the_salt_is_not_the_clients_to_choose(theft: Theft, way: str, dialect: str) -> None:
    """H01, ways 1 to 4: the same text, in another dialect, with a salt of its own, without one."""
    change = (CHOSEN_SALTS | REMOVED_SALTS)[way]
    for is_stream in (False, True):
        fields = {"stream_options": {"include_usage": True}} if dialect in ("chat", "completions") else {}
        path, body = theft.request(dialect, stream=is_stream, **(fields if is_stream else {}))
        await theft.warm()
        assert cached_tokens(await theft.post("b", path, change(theft.salt, body))) == 0, is_stream
        assert cached_tokens(await theft.post("a", path, body)) > MANY_TOKENS, is_stream
    await theft.assert_still_there(dialect)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_way_it_is_sent_changes_nothing(theft: Theft, dialect: str) -> None:
    """Way 5: in chunks, in a coding, as a form, beyond the size that another process reads."""
    path, body = theft.request(dialect)
    stolen = STOLEN(theft.salt, body)
    large = behind('"x":"%s","cache_salt":"SALT"' % ("y" * 400_000))(theft.salt, body)
    form = (
        b'--x\r\nContent-Disposition: form-data; name="cache_salt"\r\n\r\n%b\r\n--x--\r\n'
        % theft.salt.encode()
    )
    attempts: list[tuple[bytes | AsyncIterator[bytes], dict[str, str]]] = [
        (in_chunks(stolen), {}),
        (large, {}),
        (in_chunks(large), {}),
        (form, {"content_type": "multipart/form-data; boundary=x"}),
        (stolen, {"content_type": "text/plain"}),
        *((code(stolen), {"content_encoding": name}) for name, code in CODINGS.items()),
        *((code(large), {"content_encoding": name}) for name, code in CODINGS.items()),
    ]
    for number, (content, headers) in enumerate(attempts):
        await theft.warm()
        assert cached_tokens(await theft.post("b", path, content, **headers)) == 0, number
    await theft.assert_still_there(dialect)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_others_session_leads_to_nothing(theft: Theft, dialect: str) -> None:
    """Way 6: its id in header, body, cookie and query, its cache key, its tags towards the worker."""
    ids = {
        "x_session_id": "the-same",
        "cookie": "session_id=the-same; sid=the-same",
        "x_cache_salt": theft.salt,
    }
    ids |= {"x_homing_session_tag": "the-same", "x_homing_group_tag": "the-same", "x_homing_tenant": "a"}
    fields: dict[str, Any] = {"prompt_cache_key": "the-same", "session_id": "the-same", "user": "the-same"}
    fields |= {"metadata": {"session_id": "the-same", "user_id": "the-same"}}
    await theft.worker.client.post("/v1/kv/clear")
    path, body = theft.request(dialect, **fields)
    assert (await theft.post("a", path, body, **ids)).status_code == 200
    for query in ("", f"?session_id=the-same&cache_salt={theft.salt}&tenant=a"):
        assert cached_tokens(await theft.post("b", path + query, body, **ids)) == 0
        await theft.worker.client.post("/v1/kv/clear")
    await theft.warm()
    await theft.assert_still_there(dialect)


async def test_a_stored_answer_is_not_continued_by_others(theft: Theft) -> None:
    """Way 7: by its id in the body, in the path, through a body that we cannot read."""
    made = (await theft.post("a", *theft.request("responses"))).json()["id"]
    await theft.world.wait_for(lambda: theft.world.gateway.proxy.num_in_flight == 0)
    more = json.dumps({"model": MODEL, "input": "and?", "previous_response_id": made}).encode()
    twice = more[:-1] + b',"previous_response_id":null,"previous_response_id":"%b"}' % made.encode()
    for content, headers in (
        (more, {}),
        (twice, {}),
        (more, {"x_session_id": "own"}),
        (more, {"content_encoding": "x-unknown"}),
        (gzip.compress(more), {"content_encoding": "gzip"}),
        (in_chunks(more), {}),
    ):
        answer = await theft.post("b", "/v1/responses", content, **headers)
        assert answer.status_code in (404, 415), answer.text
    headers = {"authorization": f"Bearer {KEYS['b']}"}
    for method, tail in (
        ("GET", ""),
        ("HEAD", ""),
        ("DELETE", ""),
        ("POST", "/cancel"),
        ("GET", "/input_items"),
    ):
        answer = await theft.world.client.request(method, f"/v1/responses/{made}{tail}", headers=headers)
        assert answer.status_code == 404, (method, tail)
    assert (await theft.post("a", "/v1/responses", more)).status_code == 200


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_pinned_prefix_is_its_tenants_own(theft: Theft, dialect: str) -> None:
    """Way 8: what is pinned for one tenant is cold for the other, in every dialect."""
    order = {"name": "secret", "messages": CHAT, "tenant": "a"}
    assert (await theft.world.admin.post("/admin/v1/pins", json=order)).status_code == 201

    def is_pinned() -> bool:
        return theft.worker.context.engine.latest_stats.num_blocks_pinned * 4 > MANY_TOKENS

    await theft.world.wait_for(is_pinned, timeout_s=20)
    assert cached_tokens(await theft.post("b", *theft.request(dialect))) == 0
    await theft.assert_still_there(dialect)


async def test_what_the_worker_tells_operators_is_not_served(theft: Theft) -> None:
    """Way 9: its view of the cache, in every spelling of the path, and a realtime connection."""
    await theft.warm()
    body = json.dumps({"messages": CHAT, "cache_salt": theft.salt}).encode()
    headers = {"authorization": f"Bearer {KEYS['b']}"}
    for path, spelling, method in itertools.product(OF_THE_WORKER, SPELLINGS, ("GET", "POST")):
        answer = await theft.world.client.request(
            method, spelling.format(path), content=body, headers=headers
        )
        assert answer.status_code in (400, 404, 405), (method, spelling, path)
    counted = await theft.post("b", "/tokenize", json.dumps({"model": MODEL, "messages": CHAT}).encode())
    assert "cached" not in counted.text
    await theft.assert_still_there("chat")


async def test_many_prompts_at_once_find_nothing_either(theft: Theft) -> None:
    """A list of prompts in one request, several choices, the prompt's own log-probabilities.

    The prompts of one request may share blocks among themselves: as many as another text's do.
    """
    other = theft.tokens[::-1]
    for fields in ({"n": 1}, {"n": 2}, {"n": 1, "echo": True, "logprobs": 1}):
        for is_list in (False, True):
            found = []
            for tokens in (theft.tokens, other):
                await theft.warm()
                prompt = [tokens, tokens[:200]] if is_list else tokens
                path, body = theft.request("completions", prompt=prompt, cache_salt=theft.salt, **fields)
                answer = await theft.post("b", path, body)
                assert answer.status_code == 200, answer.text
                found.append(cached_tokens(answer))
            assert found[0] == found[1], (fields, is_list)
