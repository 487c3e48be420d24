"""Each API in front of each kind of engine, with tenants that are to be kept apart: what arrives there."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes.dialects import DIALECTS, Dialect
from fakes.gateway_world import GatewayWorld, ProbedBackend

from gateway.fleet.settings import ENGINES

KEY = "key-of-tenant-a-0001"
KEPT: dict[str, Any] = {"priority": 3, "seed": 1, "user": "u", "tools": [], "x": {"y": [1]}}
KEPT |= {"cache_salt": "own", "extra_key": "own"}
"""Fields of a client; all but the salt arrive as they are."""
_CHATS = dict.fromkeys(("chat", "completions", "responses"), "cache_salt")
SALTED = {
    "torch": {**_CHATS, "messages": "cache_salt"},
    "vllm": {**_CHATS, "embeddings": "cache_salt"},
    "sglang": {**_CHATS, "generate": "extra_key"},
}
NO_PROMPT_CACHE = {"embeddings"}


@contextlib.asynccontextmanager
async def one_engine(engine: str, **authentication: Any) -> AsyncIterator[tuple[GatewayWorld, ProbedBackend]]:
    backend = ProbedBackend()
    await backend.start()
    try:
        async with GatewayWorld(
            0,
            environ={"A": KEY},
            backends=[{"id": "e", "url": backend.base_url, "engine": engine}],
            tenants=[{"name": "a", "keys_env": "A"}],
            authentication={"cache_salt": True, **authentication},
        ) as world:
            yield world, backend
    finally:
        await backend.stop()


async def send(world: GatewayWorld, dialect: Dialect) -> tuple[int, str]:
    answer = await world.client.post(
        dialect.path, json={**dialect.body, **KEPT}, headers={"authorization": f"Bearer {KEY}"}
    )
    return answer.status_code, answer.text


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_request_arrives_salted_or_not_at_all(engine: str) -> None:
    """H01: where the engine heeds a salt it gets the tenant's; where it does not, the request is refused and
    the client told why. Every other field arrives as it was sent."""
    async with one_engine(engine) as (world, backend):
        directory = world.gateway.authentication.gatekeeper.directory
        salt = directory.named("a").cache_salt  # type: ignore[union-attr]  # None fails
        for dialect in DIALECTS:
            backend.requests.clear()
            status, text = await send(world, dialect)
            member = SALTED.get(engine, {}).get(dialect.name)
            if member is None and dialect.name not in NO_PROMPT_CACHE:
                assert (status, backend.requests) == (403, []), dialect.name
                assert "also_salted" in text
                continue
            assert status == 200, (dialect.name, text)
            expected = {**dialect.body, **KEPT}
            if member is not None:
                expected[member] = salt
            assert backend.requests[0].json == expected, dialect.name
        world.assert_idle()


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
async def test_operators_may_decide_otherwise(engine: str) -> None:
    """`unsalted: share` sends it as received; `also_salted` salts what a newer engine heeds."""
    messages = next(dialect for dialect in DIALECTS if dialect.name == "messages")
    async with one_engine(engine, unsalted="share") as (world, backend):
        assert (await send(world, messages))[0] == 200
        assert backend.requests[0].json["cache_salt"] == "own"
    async with one_engine(engine, also_salted=[f"{engine}/messages"]) as (world, backend):
        assert (await send(world, messages))[0] == 200
        assert backend.requests[0].json["cache_salt"] != "own"


async def test_counting_tokens_is_not_refused() -> None:
    """A count computes nothing and caches nothing."""
    async with one_engine("sglang") as (world, _):
        answer = await world.client.post(
            "/v1/messages/count_tokens",
            json={"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]},
            headers={"x-api-key": KEY},
        )
        assert answer.status_code == 200
