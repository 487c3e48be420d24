"""Sessions spread by the room that they need, and a hot key by requests in flight."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from fakes.backend import stream
from fakes.gateway_world import GatewayWorld
from fakes.kv_cache import TOKEN_BYTES, CachingEngine

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'


def text(name: str, num_tokens: int) -> str:
    return (f"{name} " * num_tokens)[: num_tokens * TOKEN_BYTES]


async def test_a_fleet_at_light_load_is_filled_evenly() -> None:
    """N01: 8 agents of 17,000 tokens with one system prompt, 4 engines with room for 60,000 each, never two
    requests at once: from the second turn on nearly all comes from caches."""
    async with GatewayWorld(num_backends=4) as world:
        engines = [CachingEngine(backend, 60_000) for backend in world.backends]
        view = world.gateway.fleet.view
        await world.wait_for(
            lambda: all(one.kv_capacity_tokens for one in world.gateway.fleet.view.backends.values())
        )
        assert len(view.backends) == 4
        system = {"role": "system", "content": text("shared", 1_700)}
        talks: list[list[dict[str, Any]]] = [
            [system, {"role": "user", "content": text(f"agent-{number}", 15_300)}] for number in range(8)
        ]
        homes = []
        for turn in range(4):
            for number, messages in enumerate(talks):
                answer = await world.chat(f"agent-{number}", messages=messages)
                homes.append(answer.headers["x-homing-backend"])
                messages.append({"role": "assistant", "content": "ok"})
                messages.append({"role": "user", "content": text(f"turn-{turn}", 200)})
        assert set(Counter(homes[:8]).values()) == {2}
        later = [report for engine in engines for report in engine.reports[2:]]
        assert sum(cached for _, cached in later) >= 0.94 * sum(prompt for prompt, _ in later)


@pytest.mark.parametrize("named", [{"prompt_cache_key": "one"}, {}])
async def test_a_hot_key_spreads_to_the_bound(named: dict[str, str]) -> None:
    """G01: one request binds a bucket (a cache key, a fingerprint); then 45 streams side by side."""
    gate = asyncio.Event()
    async with GatewayWorld(num_backends=3) as world:
        messages = [{"role": "user", "content": "What do all these people want to know at once?"}]
        assert (await world.chat(messages=messages, **named)).status_code == 200
        for backend in world.backends:
            backend.default = stream(EVENT, b"data: [DONE]\n\n", gates={1: gate})
            backend.requests.clear()
        streams = [
            asyncio.create_task(world.chat(messages=messages, stream=True, **named)) for _ in range(45)
        ]
        await world.wait_for(lambda: sum(world.served().values()) == 45)
        assert max(world.served().values()) <= 19  # 1.25 × 45 / 3
        gate.set()
        assert {answer.status_code for answer in await asyncio.gather(*streams)} == {200}
        world.assert_idle()


async def test_a_cleared_cache_is_noticed() -> None:
    """V08: after two cold answers nothing is expected of it any more; what is computed anew counts again."""
    async with GatewayWorld(num_backends=2) as world:
        engines = [CachingEngine(backend, 60_000) for backend in world.backends]
        talks = [[{"role": "user", "content": text(f"s{number}", 3_000)}] for number in range(8)]
        homes: dict[int, str] = {}

        async def turn(number: int) -> dict[str, Any]:
            answer = await world.chat(f"s{number}", messages=talks[number])
            talks[number] += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
            assert world.gateway  # every request that has ended is written down
            homes[number] = answer.headers["x-homing-backend"]
            found: dict[str, Any] = answer.json()["usage"]["prompt_tokens_details"]
            return found

        async def expected(number: int) -> int:
            body = {"model": "fake-model", "messages": talks[number]}
            question = {"headers": {"x-session-id": f"s{number}"}, "body": body}
            decision = (await world.admin.post("/admin/v1/route", json=question)).json()
            tokens: int = decision["expected_cached_tokens"]
            return tokens

        for number in [*range(8), *range(8)]:
            await turn(number)
        assert min([await expected(number) for number in range(8)]) > 2_000
        for engine in engines:
            engine.clear()
        by_home = [[number for number in homes if homes[number] == name] for name in ("b0", "b1")]
        seen = [*by_home[0][:2], *by_home[1][:2]]
        for number in seen:
            assert (await turn(number))["cached_tokens"] == 0
        rows = (await world.admin.get("/admin/v1/backends")).json()["backends"]
        assert [row["routing"]["found_empty"] for row in rows] == [1, 1]
        unseen = set(range(8)) - set(seen)
        assert [await expected(number) for number in unseen] == [0] * 4
        assert [await expected(number) > 2_000 for number in (seen[1], seen[3])] == [True, True]
