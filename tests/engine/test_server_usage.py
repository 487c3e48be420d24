"""Every usage of every endpoint has cached tokens, and cached + computed = prompt.

What was computed is not asked of any counter: the runner is watched, position by position.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from engine.test_tiers_engine import EagerPlanner
from engine.worker_app import MODEL, Worker, running_worker, sse_events
from fakes.tiny_checkpoint import write_tiny_checkpoint

from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.kv.tiers.tier_config import TierConfig
from engine_adapter.engine.scheduling.scheduler import ScheduledSequence

TEXT = "Ten of the tenants tend to tender their tents to the tenth tenant."


class WatchedRunner:
    """Hands every step on, and remembers which prompt positions it computed for whom."""

    def __init__(self, engine: LLMEngine) -> None:
        self._runner = engine._runner
        self.computed: dict[str, set[int]] = {}

    def run(self, scheduled: list[ScheduledSequence]) -> Any:
        for item in scheduled:
            sequence = item.sequence
            start = sequence.num_computed_tokens
            end = min(start + item.num_new_tokens, sequence.num_prompt_tokens)
            self.computed.setdefault(sequence.request_id, set()).update(range(start, end))
        return self._runner.run(scheduled)

    def take_first(self) -> int:
        """Return how many positions the first of n answers computed. Changes: forgets all."""
        first = next(iter(self.computed.values()))
        self.computed.clear()
        return len(first)


def watch(worker: Worker) -> WatchedRunner:
    engine = worker.context.engine._engine
    watched = WatchedRunner(engine)
    engine._runner = watched  # type: ignore[assignment]  # all that the engine calls is there
    engine.tiers.loads.planner = EagerPlanner()
    return watched


# -- the endpoints, and where each dialect has its numbers


def openai_numbers(usage: Any) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def responses_numbers(usage: Any) -> tuple[int, int]:
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def messages_numbers(usage: Any) -> tuple[int, int]:
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached  # this dialect counts what was computed


MESSAGES = [{"role": "user", "content": TEXT}]
ENDPOINTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], tuple[int, int]]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}, openai_numbers),
    "chat_n": ("/v1/chat/completions", {"messages": MESSAGES, "n": 3}, openai_numbers),
    "completions": ("/v1/completions", {"prompt": TEXT}, openai_numbers),
    "completions_n": ("/v1/completions", {"prompt": TEXT, "n": 2}, openai_numbers),
    "completions_scored": ("/v1/completions", {"prompt": TEXT, "echo": True, "logprobs": 1}, openai_numbers),
    "responses": ("/v1/responses", {"input": TEXT, "max_output_tokens": 16}, responses_numbers),
    "messages": ("/v1/messages", {"messages": MESSAGES}, messages_numbers),
}
STREAM_OPTIONS = {"stream": True, "stream_options": {"include_usage": True}}


def usages_of(events: list[Any]) -> list[Any]:
    """Every usage object of a stream, wherever the dialect puts it."""
    holders = [event for event in events if isinstance(event, dict)]
    holders += [event[key] for event in holders for key in ("response", "message") if key in event]
    return [holder["usage"] for holder in holders if holder.get("usage")]


async def usages(worker: Worker, name: str, *, streams: bool) -> list[tuple[int, int]]:
    """Ask an endpoint and return (prompt, cached) of each usage in its answer."""
    path, fields, numbers = ENDPOINTS[name]
    body = {"model": MODEL, "max_tokens": 6, "temperature": 0, **fields}
    if streams:
        body |= STREAM_OPTIONS if numbers is openai_numbers else {"stream": True}
    response: ClientResponse = await worker.client.post(path, json=body)
    assert response.status == 200, await response.text()
    found = usages_of(sse_events(await response.read())) if streams else [(await response.json())["usage"]]
    assert found, "no usage at all"
    return [numbers(usage) for usage in found]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "quantised": {"kv_dtype": "int8"},
    "tiered": {"tiers": TierConfig(host_bytes=1 << 20)},
}


@pytest.fixture(params=SETTINGS)
async def worker(checkpoint: Path, request: pytest.FixtureRequest) -> AsyncIterator[Worker]:
    async with running_worker(checkpoint, max_batch_tokens=40, **SETTINGS[request.param]) as running:
        yield running


async def test_cached_and_computed_are_the_prompt_everywhere(worker: Worker) -> None:
    """Cold, warm, and warm from a tier; whole and streamed; every usage object of the answer."""
    watched = watch(worker)
    total_cached = 0
    for name in ENDPOINTS:
        await worker.context.engine.call(LLMEngine.clear_cache)
        for streams in (False, True, False):
            if streams:
                await worker.context.engine.call(lambda engine: engine.blocks.clear_cache())
            numbers = await usages(worker, name, streams=streams)
            computed = watched.take_first()
            for prompt, cached in numbers:
                assert cached + computed == prompt, (name, streams)
            total_cached += numbers[-1][1]
    assert total_cached > 4 * len(TEXT)
    page = await (await worker.client.get("/metrics")).text()
    line = next(line for line in page.splitlines() if line.startswith("vllm:prompt_tokens_cached_total"))
    assert float(line.rpartition(" ")[2]) == total_cached


async def test_cached_and_computed_are_the_prompt_after_a_preemption(checkpoint: Path) -> None:
    """What a preempted request finds again when it comes back is no hit of its prompt."""
    async with running_worker(checkpoint, num_kv_blocks=64, max_batch_tokens=48) as worker:
        watched = watch(worker)
        asked = [worker.chat(f"{number} {TEXT}", max_tokens=90) for number in range(2)]
        answers = [await response.json() for response in await asyncio.gather(*asked)]
        assert worker.context.engine.latest_stats.num_preemptions > 0
        computed = sorted(len(positions) for positions in watched.computed.values())
        numbers = [openai_numbers(answer["usage"]) for answer in answers]
        assert sorted(prompt - cached for prompt, cached in numbers) == computed
