"""Structured answers and tools over HTTP: a random model obeys the grammar, and errors name the field."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine.worker_app import Worker, running_worker, sse_events
from fakes.tiny_checkpoint import write_tiny_checkpoint

pytest.importorskip("xgrammar", reason="needs the extra homing[grammar]")

SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["S", "M"]}, "ok": {"type": "boolean"}},
    "required": ["size", "ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "order", "parameters": SCHEMA}}
HOT = {"temperature": 2, "max_tokens": 200, "ignore_eos": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def worker(checkpoint: Path) -> AsyncIterator[Worker]:
    async with running_worker(checkpoint, num_kv_blocks=2048) as running:
        yield running


async def content_of(response: Any) -> str:
    answer = await response.json()
    assert response.status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "stop"
    return str(answer["choices"][0]["message"]["content"])


async def test_a_json_schema_is_obeyed_whatever_the_model_wants(worker: Worker) -> None:
    """Random weights at temperature 2 still give exactly one object of the schema, then the end."""
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        value = json.loads(await content_of(await worker.chat(response_format=format_, seed=seed, **HOT)))
        assert set(value) == {"size", "ok"}
        assert value["size"] in ("S", "M")


async def test_regex_and_choice_are_obeyed(worker: Worker) -> None:
    """guided_regex, guided_choice and response_format regex, for chat and text completions."""
    pattern = r"[ab]{3}-[0-9]{2}"
    format_ = {"type": "regex", "pattern": pattern}
    assert re.fullmatch(pattern, await content_of(await worker.chat(response_format=format_, **HOT)))
    assert re.fullmatch(pattern, await content_of(await worker.chat(guided_regex=pattern, **HOT)))
    answer = await (await worker.complete(guided_choice=["yes", "no"], **HOT)).json()
    assert answer["choices"][0]["text"] in ("yes", "no")


async def test_a_required_tool_is_called(worker: Worker) -> None:
    """tool_choice required and by name: one call whose arguments fit, finish_reason tool_calls."""
    for choice in ("required", {"type": "function", "function": {"name": "order"}}):
        answer = await (await worker.chat(tools=[TOOL], tool_choice=choice, **HOT)).json()
        (entry,) = answer["choices"]
        assert entry["finish_reason"] == "tool_calls"
        (call,) = entry["message"]["tool_calls"]
        assert entry["message"]["content"] is None
        assert call["type"] == "function"
        assert call["id"].startswith("call_")
        assert call["function"]["name"] == "order"
        assert set(json.loads(call["function"]["arguments"])) == {"size", "ok"}


async def test_a_streamed_tool_call_equals_the_whole_one(worker: Worker) -> None:
    """The same seed gives the same call in a stream, numbered from zero."""
    fields = {"tools": [TOOL], "tool_choice": "required", "seed": 5, **HOT}
    whole = (await (await worker.chat(**fields)).json())["choices"][0]["message"]["tool_calls"][0]
    *chunks, _ = sse_events(await (await worker.chat(stream=True, **fields)).read())
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["index"] == 0
    assert calls[0]["function"] == whole["function"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_tools_and_their_results_reach_the_prompt(worker: Worker) -> None:
    """Without template support, tools are described in text; a finished call in the history is valid."""
    call = {"id": "c1", "type": "function", "function": {"name": "order", "arguments": '{"size": "S"}'}}
    messages = [
        {"role": "user", "content": "order one"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "done"}]},
    ]
    plain = (await (await worker.chat("order one")).json())["usage"]["prompt_tokens"]
    answer = await worker.chat(messages=messages, tools=[TOOL])
    assert answer.status == 200
    assert (await answer.json())["usage"]["prompt_tokens"] > plain + 100


async def test_bad_forms_are_named(worker: Worker) -> None:
    """Unknown, contradicting or uncompilable wishes: 400 with the field."""
    faults: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "regex"}}, "response_format.pattern"),
        ({"guided_regex": "([a"}, "guided_regex"),
        ({"guided_json": {"type": "no-such-type"}}, "guided_json"),
        ({"guided_regex": "a" * 200_000}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [TOOL] * 200}, "tools"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ]
    for fields, param in faults:
        response = await worker.chat(**fields)
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, param), (fields, error)
        assert ".cc:" not in error["message"], "a source line of the grammar library"
