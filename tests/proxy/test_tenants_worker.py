"""Tenants in front of a real worker: nobody gets at another's cached prompt, whatever the request says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine.worker_app import MODEL, running_worker
from fakes.gateway_world import GatewayWorld
from fakes.tiny_checkpoint import write_tiny_checkpoint

KEYS = {"a": "key-of-tenant-a-0001", "b": "key-of-tenant-b-0001"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def world(checkpoint: Path) -> AsyncIterator[GatewayWorld]:
    async with running_worker(checkpoint) as worker:
        url = str(worker.client.make_url("/"))
        async with GatewayWorld(
            0,
            environ={"A": KEYS["a"], "B": KEYS["b"]},
            backends=[{"id": "w", "url": url, "engine": "torch"}],
            tenants=[
                {"name": "a", "keys_env": "A"},
                {"name": "b", "keys_env": "B", "limits": {"tokens_per_minute": 10**9}},
            ],
            authentication={"cache_salt": True},
        ) as world:
            yield world


async def cached_tokens(world: GatewayWorld, tenant: str, content: bytes | AsyncIterator[bytes]) -> int:
    """What the worker says that it found in its cache for this body."""
    answer = await world.client.post(
        "/v1/chat/completions",
        content=content,
        headers={
            "authorization": f"Bearer {KEYS[tenant]}",
            "content-type": "application/json",
            "x-session-id": "the-same",
        },
    )
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def body(prompt: str, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": prompt}]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 2, **fields}).encode()


async def in_chunks(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 100):
        yield data[start : start + 100]


async def test_identical_prompts_of_two_tenants_share_nothing(world: GatewayWorld) -> None:
    """B65: no salt, an own one, the stolen one, twice, escaped, in chunks, the other's key as `user`.

    The first tenant finds its own prompt again each time; the second finds nothing of it.
    """
    salt = world.gateway.authentication.gatekeeper.directory.named("a").cache_salt  # type: ignore[union-attr]  # None fails
    variants: dict[str, Any] = {
        "none": lambda prompt: body(prompt),
        "own": lambda prompt: body(prompt, cache_salt="own"),
        "stolen": lambda prompt: body(prompt, cache_salt=salt),
        "twice": lambda prompt: (
            b'{"cache_salt":"%b",' % str(salt).encode() + body(prompt, cache_salt=salt)[1:]
        ),
        "escaped": lambda prompt: b'{"cache\\u005fsalt":"%b",' % str(salt).encode() + body(prompt)[1:],
        "chunked": lambda prompt: in_chunks(body(prompt, cache_salt=salt)),
        "user": lambda prompt: body(prompt, user=KEYS["a"], prompt_cache_key="the-same"),
    }
    for name, variant in variants.items():
        prompt = f"{name}: " + "a secret that only tenant a may know. " * 8
        assert await cached_tokens(world, "a", body(prompt)) < 32
        assert await cached_tokens(world, "a", body(prompt)) > 250, name
        assert await cached_tokens(world, "b", variant(prompt)) < 32, name
        assert await cached_tokens(world, "b", body(prompt)) > 250, name  # its own, by now


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_that_was_asked_for_usage_has_the_same_bytes(world: GatewayWorld, path: str) -> None:
    """Of a tenant with a limit as of one without, ids and times aside; and it is charged as reported."""
    asked = {"model": MODEL, "stream": True, "max_tokens": 9, "temperature": 0, "n": 2, "seed": 1}
    prompt = {"prompt": "hello"} if path == "/v1/completions" else {"messages": HELLO}
    streams = []
    for tenant in ("a", "b"):
        headers = {"authorization": f"Bearer {KEYS[tenant]}"}
        answer = await world.client.post(path, json=asked | prompt, headers=headers)
        assert answer.status_code == 200, answer.text
        streams.append(re.sub(r'"(id|created)":("[^"]*"|[0-9]+)', "", answer.text).split("\n\n"))
    assert sorted(streams[0]) == sorted(streams[1])  # the two choices come in any order
    assert "usage" not in str(streams)
    world.gateway.ledger.drain()
    page = (await world.client.get("/metrics")).text
    assert 'homing_completion_tokens_total{backend="w"} 18' in page


HELLO = [{"role": "user", "content": "hello"}]


async def test_a_pin_is_its_tenants_own(world: GatewayWorld) -> None:
    """Pinned for one tenant, a prefix is warm at that tenant's first request and cold at the other's."""
    prompt = "a handbook that only tenant a may know. " * 8
    order = {"name": "handbook", "messages": [{"role": "user", "content": prompt}]}
    refused = [
        (await world.admin.post("/admin/v1/pins", json=one)).status_code
        for one in (order, {**order, "tenant": "nobody"})
    ]
    assert refused == [400, 400]
    made = await world.admin.post("/admin/v1/pins", json={**order, "tenant": "a"})
    assert made.status_code == 201, made.text
    async with asyncio.timeout(20):
        while (await world.admin.get("/admin/v1/pins")).json()["backends"][0]["pins"][0][
            "pinned_tokens"
        ] < 250:
            await asyncio.sleep(0.02)
    assert await cached_tokens(world, "b", body(prompt)) < 32
    assert await cached_tokens(world, "a", body(prompt)) > 250
