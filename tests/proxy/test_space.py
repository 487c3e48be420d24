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
