"""The KV routes: pins, explain, inventory, clearing, and what survives a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from engine.worker_app import LIMIT_S, Worker, finished_requests, running_worker
from fakes.tiny_checkpoint import write_tiny_checkpoint

from engine_adapter.engine.core.stats import EngineStats
from engine_adapter.engine.kv.tiers.tier_config import TierConfig

SYSTEM = {"role": "system", "content": "You are a very patient assistant."}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def worker(checkpoint: Path) -> AsyncIterator[Worker]:
    async with running_worker(checkpoint, num_kv_blocks=128) as running:
        yield running


async def settled_pin(worker: Worker, pin_id: str) -> dict[str, Any]:
    """The pin once nothing of it is still being computed; bounded."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            pin: dict[str, Any] = await (await worker.client.get(f"/v1/kv/pins/{pin_id}")).json()
            if pin["state"] != "pending":
                return pin


async def test_a_pinned_system_prompt_survives_a_cleared_cache(worker: Worker) -> None:
    """The prefix named by messages is held, survives clearing, and is a hit for chats that start so."""
    response = await worker.client.post("/v1/kv/pins", json={"messages": [SYSTEM], "name": "support"})
    assert response.status == 201
    pin = await settled_pin(worker, (await response.json())["id"])
    assert pin["state"] == "pinned"
    assert pin["name"] == "support"
    assert pin["pinned_tokens"] == pin["num_tokens"] // 4 * 4
    await worker.client.post("/v1/kv/clear")
    usage = (await (await worker.chat(messages=[SYSTEM, USER])).json())["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= pin["pinned_tokens"]
    stats = await (await worker.client.get("/v1/kv/stats")).json()
    assert stats["num_blocks_pinned"] == pin["pinned_tokens"] // 4


async def test_pins_are_listed_and_removed(worker: Worker) -> None:
    """DELETE frees; a second DELETE and an unknown id are 404."""
    made = await (await worker.client.post("/v1/kv/pins", json={"prompt": "x" * 20})).json()
    listed = await (await worker.client.get("/v1/kv/pins")).json()
    assert [pin["id"] for pin in listed["pins"]] == [made["id"]]
    assert listed["budget_blocks"] == 64
    assert (await worker.client.delete(f"/v1/kv/pins/{made['id']}")).status == 200
    assert (await worker.client.delete(f"/v1/kv/pins/{made['id']}")).status == 404
    assert (await worker.client.get("/v1/kv/pins/none")).status == 404
    assert (await (await worker.client.get("/v1/kv/pins")).json())["pinned_blocks"] == 0


async def test_what_cannot_be_pinned_says_why(worker: Worker) -> None:
    """Too short is a 409, ambiguous or malformed prefixes are a 400 with the field."""
    assert (await worker.client.post("/v1/kv/pins", json={"prompt": "x"})).status == 409
    for body, param in [
        ({}, "messages"),
        ({"prompt": "a", "tokens": [1]}, "prompt"),
        ({"tokens": [-1]}, "tokens"),
        ({"messages": []}, "messages"),
        ({"prompt": "x" * 20, "ttl_s": 0}, "ttl_s"),
        ({"prompt": 5}, "prompt"),
    ]:
        response = await worker.client.post("/v1/kv/pins", json=body)
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_a_prompt_that_does_not_fit_beside_the_pins_is_a_503(checkpoint: Path) -> None:
    """For the client and in the metrics it is neither a failure nor a full queue."""
    async with running_worker(checkpoint, num_kv_blocks=16) as worker:
        made = await (await worker.client.post("/v1/kv/pins", json={"prompt": "p" * 32})).json()
        assert (await settled_pin(worker, made["id"]))["pinned_tokens"] == 32
        response = await worker.complete("q" * 50)
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "kv_capacity"
        assert await finished_requests(worker) == {"capacity": 1}


async def test_a_pin_larger_than_the_budget_is_partial(worker: Worker) -> None:
    """The answer says how much is held."""
    made = await (await worker.client.post("/v1/kv/pins", json={"prompt": "y" * 400})).json()
    pin = await settled_pin(worker, made["id"])
    assert pin["state"] == "partial"
    assert pin["pinned_tokens"] == 256
    assert pin["num_tokens"] == 400


async def test_explain_names_the_cause_of_a_miss(worker: Worker) -> None:
    """Never seen, then cached, then under another salt, then cleared."""

    async def cause(**fields: object) -> str:
        response = await worker.client.post("/v1/kv/explain", json={"messages": [USER], **fields})
        return str((await response.json())["cause"])

    assert await cause() == "never_seen"
    await worker.chat(messages=[USER])
    assert await cause() == "none"
    assert await cause(cache_salt="other") == "other_namespace"
    assert (await (await worker.client.post("/reset_prefix_cache")).json())["cleared_blocks"] > 0
    assert await cause() != "none"


async def test_the_inventory_knows_the_gateways_tags(worker: Worker) -> None:
    """Tags come as headers; the answer is resident tokens by tag; absurd tags are ignored."""
    body = {"model": "tiny", "messages": [SYSTEM, USER], "max_tokens": 2}
    headers = {"X-Homing-Session-Tag": "s1", "X-Homing-Group-Tag": "g" * 1000}
    response = await worker.client.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status == 200
    report = (await (await worker.client.get("/v1/kv/inventory")).json())["resident_tokens"]
    assert list(report) == ["s1"]
    assert report["s1"] > 40
    assert (await (await worker.client.get("/v1/kv/tree")).json())["roots"]


async def test_tiers_are_shown_and_a_restart_is_warm(checkpoint: Path, tmp_path: Path) -> None:
    """Usage, inventory, explain and stats say in which tier a chat is; the next life finds it on the disk."""
    tiers = TierConfig(disk_path=tmp_path, disk_bytes=1 << 22)
    body = {"model": "tiny", "messages": [SYSTEM, USER], "max_tokens": 2}
    async with running_worker(checkpoint, tiers=tiers) as worker:
        await worker.client.post("/v1/chat/completions", json=body, headers={"X-Homing-Session-Tag": "s1"})
        await worker.context.engine.call(lambda engine: engine.blocks.clear_cache())
        await worker.context.engine.call(lambda engine: engine.tiers._writer.flush(30))  # type: ignore[union-attr]  # None fails
        report = await (await worker.client.get("/v1/kv/inventory")).json()
        assert report["resident_tokens"] == {}
        assert report["tier_tokens"]["s1"]["disk"] > 40
        stats = await (await worker.client.get("/v1/kv/stats")).json()
        assert stats["tiers"]["disk"]["num_blocks"] > 10
    async with running_worker(checkpoint, tiers=tiers) as worker:
        explained = await (
            await worker.client.post("/v1/kv/explain", json={"messages": [SYSTEM, USER]})
        ).json()
        assert explained["num_cached_tokens"] == 0
        assert explained["tier_tokens"] == {"host": 0, "disk": explained["num_reusable_tokens"]}
        answer = await (await worker.client.post("/v1/chat/completions", json=body)).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == explained["num_reusable_tokens"]
        assert answer["homing"]["cached_tokens_by_tier"] == {"device": 0, "host": 0, "disk": cached}
        page = await (await worker.client.get("/metrics")).text()
        assert f'homing_worker_tier_hit_tokens_total{{tier="disk"}} {float(cached)}' in page
        assert (await (await worker.client.post("/v1/kv/clear")).json())["cleared_blocks"] > 0
        stats = await (await worker.client.get("/v1/kv/stats")).json()
        assert stats["tiers"]["disk"]["num_blocks"] == 0


async def test_stats_show_what_an_answered_command_did(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the answer to a command finds its effect in the statistics, however slow they are."""
    await worker.chat(messages=[USER])
    engine = await worker.context.engine.call(lambda engine: engine)
    collect = engine.stats

    def collect_slowly() -> EngineStats:
        time.sleep(0.1)
        return collect()

    monkeypatch.setattr(engine, "stats", collect_slowly)
    cleared = (await (await worker.client.post("/v1/kv/clear")).json())["cleared_blocks"]
    assert cleared > 0
    assert (await (await worker.client.get("/v1/kv/stats")).json())["num_blocks_cached"] == 0


async def test_pins_come_back_after_a_restart(checkpoint: Path, tmp_path: Path) -> None:
    """The manifest names the prefix; the next life computes it before anything else."""
    manifest = tmp_path / "pins.json"
    async with running_worker(checkpoint, pin_manifest_path=manifest) as worker:
        await worker.client.post("/v1/kv/pins", json={"messages": [SYSTEM], "name": "kept"})
    async with running_worker(checkpoint, pin_manifest_path=manifest) as worker:
        (pin,) = (await (await worker.client.get("/v1/kv/pins")).json())["pins"]
        assert pin["name"] == "kept"
        assert (await settled_pin(worker, pin["id"]))["state"] == "pinned"


async def test_kv_events_are_published(checkpoint: Path) -> None:
    """A subscriber at the advertised address hears of stored blocks and of the worker's epoch."""
    async with running_worker(checkpoint, publishes_kv_events=True) as worker:
        advertised = (await (await worker.client.get("/v1/kv/stats")).json())["kv_events"]
        context = zmq.asyncio.Context()
        request = context.socket(zmq.DEALER)
        request.connect(advertised["replay_endpoint"])
        await worker.chat()
        async with asyncio.timeout(LIMIT_S):
            stored = False
            while not stored:
                await request.send_multipart([b"", b"snapshot"])
                number = b""
                while number != (-1).to_bytes(8, "big", signed=True):
                    *_, number, payload = await request.recv_multipart()
                    stored = stored or (bool(payload) and b"BlockStored" in payload)
                    assert not payload or msgspec.msgpack.decode(payload)
        request.close(linger=0)
        context.term()
