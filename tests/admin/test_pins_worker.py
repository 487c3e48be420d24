"""Pins through the admin API on a real worker: kept, listed, not doubled, let go; salted for their tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine.worker_app import MODEL, running_worker
from fakes.gateway_world import GatewayWorld
from fakes.tiny_checkpoint import write_tiny_checkpoint

V1 = "/admin/v1"
SYSTEM = {"role": "system", "content": "You are a very patient assistant."}
ORDER = {"name": "support", "messages": [SYSTEM]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def url(checkpoint: Path) -> AsyncIterator[str]:
    async with running_worker(checkpoint, num_kv_blocks=128) as worker:
        yield str(worker.client.make_url("/"))


async def settled(world: GatewayWorld) -> dict[str, Any]:
    """The one pin, once nothing of it is still being computed."""
    async with asyncio.timeout(20):
        while True:
            (row,) = (await world.admin.get(f"{V1}/pins")).json()["backends"]
            (pin,) = row["pins"]
            if pin["state"] != "pending":
                return dict(pin)
            await asyncio.sleep(0.02)


async def test_a_pin_is_kept_once_and_let_go(url: str) -> None:
    """201, then 200 for the same name; the engine holds it; unpinning twice is 404 the second time."""
    async with GatewayWorld(0, backends=[{"id": "w", "url": url, "engine": "torch"}]) as world:
        made = await world.admin.post(f"{V1}/pins", json=ORDER)
        assert made.status_code == 201, made.text
        assert (await world.admin.post(f"{V1}/pins", json=ORDER)).status_code == 200
        pin = await settled(world)
        assert (pin["name"], pin["state"], pin["pinned_tokens"] > 0) == ("support", "pinned", True)
        answer = await world.chat(
            model=MODEL, messages=[SYSTEM, {"role": "user", "content": "hi"}], max_tokens=2
        )
        details = answer.json()["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] >= pin["pinned_tokens"]
        gone = await world.admin.delete(f"{V1}/pins/support")
        assert [one["pins"] for one in gone.json()["backends"]] == [[]]
        assert (await world.admin.delete(f"{V1}/pins/support")).status_code == 404


async def test_a_worker_that_joins_later_gets_the_fleets_pins(url: str, checkpoint: Path) -> None:
    """A real engine computes the pin that was ordered before it came, and serves from it."""
    async with (
        running_worker(checkpoint, num_kv_blocks=128) as joiner,
        GatewayWorld(0, backends=[{"id": "w", "url": url, "engine": "torch"}]) as world,
    ):
        assert (await world.admin.post(f"{V1}/pins", json=ORDER)).status_code == 201
        spec = {"id": "later", "url": str(joiner.client.make_url("/")), "engine": "torch"}
        assert (await world.admin.post(f"{V1}/backends", json=spec)).status_code == 201
        async with asyncio.timeout(20):
            while True:
                rows = (await world.admin.get(f"{V1}/pins")).json()["backends"]
                (row,) = [one for one in rows if one["backend"] == "later"]
                if [pin["state"] for pin in row["pins"]] == ["pinned"]:
                    break
                await asyncio.sleep(0.05)
        assert row["missing"] == []


async def test_a_salted_pin_serves_its_tenant_only(url: str) -> None:
    """Where caches are kept apart, the order must name the tenant; the salt itself is never shown."""
    async with GatewayWorld(
        0,
        environ={"A": "key-of-tenant-a-0001", "B": "key-of-tenant-b-0001"},
        backends=[{"id": "w", "url": url, "engine": "torch"}],
        tenants=[{"name": "a", "keys_env": "A"}, {"name": "b", "keys_env": "B"}],
        authentication={"cache_salt": True},
    ) as world:
        for order in (ORDER, {**ORDER, "tenant": "nobody"}):
            refused = await world.admin.post(f"{V1}/pins", json=order)
            assert (refused.status_code, refused.json()["param"]) == (400, "tenant")
        made = await world.admin.post(f"{V1}/pins", json={**ORDER, "tenant": "a"})
        assert made.status_code == 201, made.text
        assert "salt" not in made.text
        pin = await settled(world)
        assert pin["owner"] == "a"
        cached = {}
        for tenant in ("b", "a"):
            answer = await world.chat(
                model=MODEL,
                messages=[SYSTEM, {"role": "user", "content": f"hi from {tenant}"}],
                max_tokens=2,
                headers={"authorization": f"Bearer key-of-tenant-{tenant}-0001"},
            )
            cached[tenant] = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached["a"] >= pin["pinned_tokens"] > 0
        assert cached["b"] == 0


async def test_a_pin_beyond_the_budget_is_refused_in_the_engines_words(url: str) -> None:
    """409, naming the backend."""
    async with GatewayWorld(0, backends=[{"id": "w", "url": url, "engine": "torch"}]) as world:
        for number in range(50):
            order = {"name": f"pin-{number}", "tokens": [number + 1] * 200}
            answer = await world.admin.post(f"{V1}/pins", json=order)
            if answer.status_code == 409:
                break
        assert answer.status_code == 409
        assert "backend w refused" in answer.json()["detail"]
