"""Fields that every dialect has: none is lost on the way to the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine.worker_app import MODEL, Worker, running_worker
from fakes.tiny_checkpoint import write_tiny_checkpoint

from engine_adapter.engine.core.llm_engine import LLMEngine
from engine_adapter.engine.kv.sequence import EngineRequest
from engine_adapter.server import messages_api, responses_api
from engine_adapter.server.protocol import CarriedFields, ChatRequest, CompletionRequest

TEXT = "a text that all dialects carry"
CHAT = [{"role": "user", "content": TEXT}]
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}),
    "completions": ("/v1/completions", {"prompt": TEXT, "max_tokens": 3}),
    "messages": ("/v1/messages", {"messages": CHAT, "max_tokens": 3}),
    "responses": ("/v1/responses", {"input": TEXT, "max_output_tokens": 3}),
}
TYPES = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "messages": messages_api.MessagesRequest,
    "responses": responses_api.ResponsesRequest,
}
VALUES: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.25,
    "min_tokens": 2,
    "seed": 11,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "logit_bias": {"3": 1.0},
    "cache_salt": "of tenant a",
    "priority": 3,
    "stream": False,
}
"""One value that is no default for each field that must survive."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def worker(checkpoint: Path) -> AsyncIterator[Worker]:
    async with running_worker(checkpoint) as worker:
        yield worker


def test_every_field_has_a_value_in_this_test() -> None:
    """A field that is added to the definition is tried in each dialect."""
    assert set(CarriedFields.__struct_fields__) == VALUES.keys()


@pytest.mark.parametrize("dialect", TYPES)
def test_every_dialect_reads_the_common_fields(dialect: str) -> None:
    """H01: by the same names, and none of its own hides one."""
    required = {"messages": [], "prompt": "x", "input": "x"}
    body = msgspec.convert({**required, **VALUES}, TYPES[dialect])
    assert {name: getattr(body, name) for name in VALUES} == VALUES


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_what_is_sent_reaches_the_engine(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, dialect: str
) -> None:
    """H01: the same sampling, salt and priority as by a chat, in every dialect."""
    seen: list[EngineRequest] = []
    real = LLMEngine.add_request

    def spy(engine: LLMEngine, request: EngineRequest) -> None:
        seen.append(request)
        real(engine, request)

    monkeypatch.setattr(LLMEngine, "add_request", spy)
    for name in (dialect, "chat"):
        path, body = DIALECTS[name]
        answer = await worker.client.post(path, json={**body, **VALUES})
        assert answer.status == 200, await answer.text()
    sent, by_chat = seen
    assert (sent.cache_salt, sent.priority) == (VALUES["cache_salt"], VALUES["priority"])
    assert sent.sampling == by_chat.sampling


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_salt_keeps_prompts_apart(worker: Worker, dialect: str) -> None:
    """H01: the same request finds its cache again, and with another salt, or none, it finds nothing."""
    path, body = DIALECTS[dialect]

    async def cached(**fields: str) -> int:
        answer = await worker.client.post(path, json={"model": MODEL, **body, **fields})
        usage = (await answer.json())["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
        return int(details.get("cached_tokens", details.get("cache_read_input_tokens")))

    assert await cached(cache_salt="a") == 0
    assert await cached(cache_salt="a") > 0
    assert await cached(cache_salt="b") == 0
    assert await cached() == 0


async def test_an_answer_is_continued_under_its_own_salt_only(worker: Worker) -> None:
    """With another salt, or none, it looks like one that never was."""

    async def respond(**fields: str) -> Any:
        path, body = DIALECTS["responses"]
        answer = await worker.client.post(path, json={"model": MODEL, **body, **fields})
        return await answer.json()

    first = (await respond(cache_salt="a"))["id"]
    assert "output" in await respond(cache_salt="a", previous_response_id=first)
    refusals = [
        await respond(cache_salt="b", previous_response_id=first),
        await respond(previous_response_id=first),
        await respond(cache_salt="b", previous_response_id="resp_unknown"),
    ]
    assert refusals[0] == refusals[1] == refusals[2]
    assert refusals[0]["error"]["param"] == "previous_response_id"
