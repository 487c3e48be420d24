"""The dialects as their vendors' own clients speak them: openai-python and anthropic."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from engine.worker_app import MODEL, Worker, running_worker, sse_events
from fakes.tiny_checkpoint import write_tiny_checkpoint
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

PARAMETERS = {"type": "object", "properties": {"size": {"enum": ["S", "M"]}}, "required": ["size"]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def worker(checkpoint: Path) -> AsyncIterator[Worker]:
    async with running_worker(checkpoint, num_kv_blocks=2048) as running:
        yield running


@pytest.fixture
async def openai_client(worker: Worker) -> AsyncIterator[openai.AsyncOpenAI]:
    url = str(worker.client.make_url("/v1"))
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def anthropic_client(worker: Worker) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = str(worker.client.make_url("/"))
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


async def test_openai_chat_whole_and_streamed(openai_client: openai.AsyncOpenAI) -> None:
    """openai-python parses both, and they say the same."""
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = await openai_client.chat.completions.create(**request)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    stream = await openai_client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **request
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_openai_errors_have_their_classes(openai_client: openai.AsyncOpenAI) -> None:
    """Statuses and codes reach the client's own exception types."""
    with pytest.raises(openai.NotFoundError) as caught:
        await openai_client.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        await openai_client.chat.completions.create(model=MODEL, messages=[])
    assert refused.value.param == "messages"


async def test_responses_continue_by_id(openai_client: openai.AsyncOpenAI) -> None:
    """The follow-up holds the first turn, so its prompt is longer and partly cached; deleting forgets."""
    first = await openai_client.responses.create(
        model=MODEL, input="hello there", max_output_tokens=6, temperature=0
    )
    second = await openai_client.responses.create(
        model=MODEL, input="and now?", previous_response_id=first.id, max_output_tokens=6, temperature=0
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + 6
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert (await openai_client.responses.retrieve(first.id)).output_text == first.output_text
    await openai_client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await openai_client.responses.create(model=MODEL, input="x", previous_response_id=first.id)


async def test_responses_stream_ends_with_the_whole(openai_client: openai.AsyncOpenAI) -> None:
    """Deltas join to the text of the final event, numbers count up, an unstored answer is not kept."""
    stream = await openai_client.responses.create(
        model=MODEL, input="hello", max_output_tokens=9, temperature=0, stream=True, store=False
    )
    events = [item async for item in stream]
    assert [item.sequence_number for item in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    final = events[-1]
    assert final.type in ("response.completed", "response.incomplete")
    deltas = "".join(item.delta for item in events if item.type == "response.output_text.delta")
    assert deltas == final.response.output_text
    with pytest.raises(openai.NotFoundError):
        await openai_client.responses.retrieve(final.response.id)


async def test_responses_call_functions_and_take_their_output(openai_client: openai.AsyncOpenAI) -> None:
    """A required function comes back as an item; its output is accepted as the next input."""
    pytest.importorskip("xgrammar", reason="needs the extra homing[grammar]")
    tool: Any = {"type": "function", "name": "order", "parameters": PARAMETERS, "strict": False}
    first = await openai_client.responses.create(
        model=MODEL, input="order", tools=[tool], tool_choice="required", max_output_tokens=300
    )
    (call,) = first.output
    assert call.type == "function_call"
    assert call.name == "order"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    second = await openai_client.responses.create(
        model=MODEL, input=[output], previous_response_id=first.id, max_output_tokens=3
    )
    assert second.status in ("completed", "incomplete")


async def test_responses_refuse_what_they_would_ignore(worker: Worker) -> None:
    """Fields that carry context or abilities we lack: 400 with the field."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "message", "role": "user"}]}, "input[0]"),
    ]
    for fields, param in cases:
        response = await worker.client.post("/v1/responses", json={"model": MODEL, "input": "x", **fields})
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_answers_have_every_field_that_strict_clients_want(worker: Worker) -> None:
    """Whole answers and events of a stream pass the validation of openai-python's own types."""
    tool = {"type": "function", "name": "order", "parameters": PARAMETERS}
    asked = {"model": MODEL, "input": "hello", "max_output_tokens": 9, "temperature": 0, "tools": [tool]}
    for fields in ({}, {"tool_choice": "required", "max_output_tokens": 200}):
        response = await worker.client.post("/v1/responses", json=asked | fields)
        Response.model_validate(await response.json())
        stream = await worker.client.post("/v1/responses", json=asked | fields | {"stream": True})
        for item in sse_events(await stream.read()):
            TypeAdapter(ResponseStreamEvent).validate_python(item)
    ChatCompletion.model_validate(await (await worker.chat(logprobs=True, top_logprobs=2, n=2)).json())
    Completion.model_validate(await (await worker.complete(logprobs=2)).json())
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, _ = sse_events(await (await worker.chat(**options)).read())
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)


async def test_anthropic_messages_whole_and_streamed(anthropic_client: anthropic.AsyncAnthropic) -> None:
    """anthropic's client parses both; usage splits computed and cached tokens."""
    request: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 12,
        "extra_body": {"temperature": 0},
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    }
    whole = await anthropic_client.messages.create(**request)
    assert whole.stop_reason in ("max_tokens", "end_turn")
    assert whole.usage.cache_read_input_tokens == 0
    async with anthropic_client.messages.stream(**request) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert final.stop_reason == whole.stop_reason
    assert final.usage.cache_read_input_tokens is not None
    assert final.usage.cache_read_input_tokens > 0
    total = final.usage.cache_read_input_tokens + final.usage.input_tokens
    assert total == whole.usage.input_tokens
    counted = await anthropic_client.messages.count_tokens(
        model=MODEL, system=request["system"], messages=request["messages"]
    )
    assert counted.input_tokens == total


async def test_anthropic_tools_go_there_and_back(anthropic_client: anthropic.AsyncAnthropic) -> None:
    """A forced tool is a tool_use block, streamed or not; its result is a legal next message."""
    pytest.importorskip("xgrammar", reason="needs the extra homing[grammar]")
    tool: Any = {"name": "order", "description": "Order it.", "input_schema": PARAMETERS}
    request: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 300,
        "tools": [tool],
        "tool_choice": {"type": "any"},
    }
    messages: list[Any] = [{"role": "user", "content": "order"}]
    whole = await anthropic_client.messages.create(messages=messages, **request)
    (block,) = whole.content
    assert block.type == "tool_use"
    assert block.input["size"] in ("S", "M")
    assert whole.stop_reason == "tool_use"
    async with anthropic_client.messages.stream(messages=messages, **request) as stream:
        final = await stream.get_final_message()
    assert final.content[0].type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
    history: list[Any] = [
        *messages,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result]},
    ]
    answer = await anthropic_client.messages.create(model=MODEL, max_tokens=3, tools=[tool], messages=history)
    assert answer.type == "message"


async def test_anthropic_stop_sequence_and_errors(
    anthropic_client: anthropic.AsyncAnthropic, worker: Worker
) -> None:
    """A matched stop sequence is reported; errors come in Anthropic's envelope with their classes."""
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    request: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 40,
        "messages": messages,
        "extra_body": {"temperature": 0},
    }
    whole = await anthropic_client.messages.create(**request)
    stop = whole.content[0].text[2:4]
    ended = await anthropic_client.messages.create(stop_sequences=[stop], **request)
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
    with pytest.raises(anthropic.NotFoundError):
        await anthropic_client.messages.create(**{**request, "model": "x"})
    response = await worker.client.post("/v1/messages", json={"model": MODEL, "messages": messages})
    document = await response.json()
    assert response.status == 400
    assert document["type"] == "error"
    assert document["error"]["type"] == "invalid_request_error"


async def test_anthropic_event_order(worker: Worker) -> None:
    """Start, one text block, its deltas, its end, the ending, stop: names repeat in the data."""
    body = {"model": MODEL, "max_tokens": 5, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    events = sse_events(await (await worker.client.post("/v1/messages", json=body)).read())
    kinds = [item["type"] for item in events if item["type"] != "content_block_delta"]
    inner = ["content_block_start", "content_block_stop"] if len(kinds) == 5 else []
    assert kinds == ["message_start", *inner, "message_delta", "message_stop"]
