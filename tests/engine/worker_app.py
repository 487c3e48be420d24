"""A whole worker in the test's own process: tiny checkpoint, real engine thread, real HTTP."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from engine_adapter.engine.core.config import EngineConfig
from engine_adapter.engine.kv.kv_event_publisher import KVEventConfig
from engine_adapter.server.app import build_app
from engine_adapter.server.serving import Phase, ServerState, ServingContext
from engine_adapter.server.startup import ServerConfig, load_context

MODEL = "tiny"
LIMIT_S = 60.0  # for what is waited for: a busy machine is slow, only a hang is an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A running worker and a client to it."""

    client: TestClient[Any, Any]
    state: ServerState
    context: ServingContext

    async def chat(self, content: object = "hello", **fields: object) -> ClientResponse:
        """Post a chat of one user message, greedy and short by default."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 5,
            "temperature": 0,
            "ignore_eos": True,  # a random model ends at random
            **fields,
        }
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: object = "hello", **fields: object) -> ClientResponse:
        """Post a text completion, greedy and short by default."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 5, "temperature": 0}
        body |= {"ignore_eos": True, **fields}
        return await self.client.post("/v1/completions", json=body)


@contextlib.asynccontextmanager
async def running_worker(
    checkpoint: Path,
    *,
    max_body_bytes: int = 2**20,
    max_queue_s: float = 60.0,
    publishes_kv_events: bool = False,
    **engine: Any,
) -> AsyncIterator[Worker]:
    """Start a worker; afterwards check that the engine holds nothing and stop it."""
    settings = {"dtype": "fp32", "block_size": 4, "num_kv_blocks": 512, **engine}
    config = ServerConfig(
        model=str(checkpoint),
        model_names=(MODEL, "alias/of tiny"),
        engine=EngineConfig(**settings),
        kv_events=KVEventConfig() if publishes_kv_events else None,
    )
    context = replace(load_context(config, lambda _: None), max_queue_s=max_queue_s)
    state = ServerState(context=context, phase=Phase.READY, detail="serving")
    server = TestServer(build_app(state, max_body_bytes=max_body_bytes))
    context.engine.start()
    async with TestClient(server) as client:
        yield Worker(client=client, state=state, context=context)
    if context.engine.is_alive:
        await context.engine.call(lambda engine: engine.verify())
    await context.engine.close()
    if context.kv_events is not None:
        context.kv_events.stop()


async def finished_requests(worker: Worker) -> dict[str, float]:
    """How many requests ended for which reason, without the reasons for which none did."""
    page = await (await worker.client.get("/metrics")).text()
    found = re.findall(r'vllm:request_success_total\{finished_reason="(\w+)",[^}]*\} (\S+)', page)
    return {reason: float(count) for reason, count in found if float(count)}


def sse_events(raw: bytes) -> list[Any]:
    """The data of a complete event stream; `[DONE]` stays a string."""
    events = [part for part in raw.decode("utf-8").split("\n\n") if part]
    datas = [line.removeprefix("data: ") for part in events for line in part.split("\n") if "data: " in line]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]
