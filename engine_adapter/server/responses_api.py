"""`/v1/responses`: OpenAI's newer dialect, as far as it applies to a text model.

Decides how input items map to chat messages and how an answer becomes output items. With `store` (the
default) the answer can be continued with `previous_response_id`, under the same `cache_salt`. Built-in tools,
background mode and conversations are refused by name: ignoring them would silently lose context.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from engine_adapter.server.answer_form import AnswerForm, chat_answer_form
from engine_adapter.server.chat import chat_generation, check_chat
from engine_adapter.server.chat_answer import WholeChoice, collect_choices, read_parts
from engine_adapter.server.errors import ApiError, bad_request, not_found, unsupported
from engine_adapter.server.event_stream import event, json_response, send_stream
from engine_adapter.server.generation import Generation, RequestStats
from engine_adapter.server.protocol import CarriedFields, ChatMessage, ChatRequest, carried
from engine_adapter.server.request_body import read_body
from engine_adapter.server.response_store import StoredResponse
from engine_adapter.server.serving import ServingContext, context_of, tags_of

Item = Mapping[str, Any]


class ResponsesRequest(CarriedFields, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingResponse:
    """One request being answered."""

    context: ServingContext
    body: ResponsesRequest
    messages: tuple[ChatMessage, ...]  # of the conversation, without instructions
    form: AnswerForm
    generation: Generation
    head: dict[str, object]


async def create(request: web.Request) -> web.StreamResponse:
    """`POST /v1/responses`."""
    context = context_of(request)
    body = await read_body(request, ResponsesRequest)
    _refuse_unsupported(body)
    messages = (*_history(context, body), *_input_messages(body.input))
    chat = _as_chat(body, messages)
    check_chat(chat)
    context.check_model(body.model)
    form = await chat_answer_form(chat, context.grammars, context.template.source)
    generation = chat_generation(context, chat, form, tags_of(request))
    pending = PendingResponse(
        context=context, body=body, messages=messages, form=form, generation=generation, head=_head(body)
    )
    if body.stream:
        return await send_stream(request, _events(pending))
    (choice,) = await collect_choices(context.metrics, generation, form.tool_format)
    return json_response(_finish(pending, choice))


def _head(body: ResponsesRequest) -> dict[str, object]:
    """The fields known from the start; strict clients need every field that OpenAI requires."""
    return {
        "id": f"resp_{secrets.token_hex(16)}",
        "object": "response",
        "created_at": int(time.time()),
        "model": body.model,
        "previous_response_id": body.previous_response_id,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": body.tools or [],
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": True,
        "text": body.text or {"format": {"type": "text"}},
        "truncation": "disabled",
        "metadata": body.metadata or {},
        "error": None,
        "incomplete_details": None,
    }


async def retrieve(request: web.Request) -> web.Response:
    """`GET /v1/responses/{id}`."""
    return json_response(_stored(context_of(request), request.match_info["response_id"]).document)


async def delete(request: web.Request) -> web.Response:
    """`DELETE /v1/responses/{id}`."""
    response_id = request.match_info["response_id"]
    context = context_of(request)
    _stored(context, response_id)
    context.responses.delete(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _stored(context: ServingContext, response_id: str, param: str = "response_id") -> StoredResponse:
    entry = context.responses.get(response_id)
    if entry is None:
        raise _unknown(param)
    return entry


def _unknown(param: str) -> ApiError:
    return not_found("no such response on this worker", param=param)


def _refuse_unsupported(body: ResponsesRequest) -> None:
    if body.conversation is not None:
        raise unsupported("conversation", "a stored conversation")
    if body.background:
        raise unsupported("background", "background mode")
    for index, tool in enumerate(body.tools or ()):
        if tool.get("type") != "function":
            raise unsupported(f"tools[{index}].type", f"the tool type {str(tool.get('type'))[:50]!r}")


def _history(context: ServingContext, body: ResponsesRequest) -> tuple[ChatMessage, ...]:
    if body.previous_response_id is None:
        return ()
    entry = _stored(context, body.previous_response_id, "previous_response_id")
    if entry.cache_salt != (body.cache_salt or ""):
        raise _unknown("previous_response_id")  # another tenant's
    return entry.messages


def _input_messages(given: str | list[dict[str, Any]]) -> list[ChatMessage]:
    if isinstance(given, str):
        return [ChatMessage(role="user", content=given)]
    messages: list[ChatMessage] = []
    for index, item in enumerate(given):
        messages.extend(_item_messages(item, f"input[{index}]"))
    return messages


def _item_messages(item: Item, where: str) -> list[ChatMessage]:
    match item.get("type", "message"):
        case "message":
            role, content = item.get("role"), item.get("content")
            if not isinstance(role, str) or not isinstance(content, str | list):
                raise bad_request(f"{where} must have a role and content", param=where, code="invalid_type")
            return [ChatMessage(role=role, content=content)]
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            return [ChatMessage(role="assistant", tool_calls=[call])]
        case "function_call_output":
            output = item.get("output")
            if not isinstance(output, str | list):
                raise bad_request(f"{where}.output is required", param=f"{where}.output")
            return [ChatMessage(role="tool", tool_call_id=str(item.get("call_id")), content=output)]
        case "reasoning":
            return []  # another model's reasoning does not belong in this prompt
    raise unsupported(f"{where}.type", f"the item type {str(item.get('type'))[:50]!r}")


def _as_chat(body: ResponsesRequest, messages: tuple[ChatMessage, ...]) -> ChatRequest:
    leading = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    tools = [{"type": "function", "function": {**tool}} for tool in body.tools or ()]
    choice = body.tool_choice
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    format_ = (body.text or {}).get("format")
    if isinstance(format_, dict) and format_.get("type") == "json_schema":
        format_ = {"type": "json_schema", "json_schema": format_}
    return ChatRequest(
        **carried(body),
        messages=[*leading, *messages],
        max_tokens=body.max_output_tokens,
        tools=tools or None,
        tool_choice=choice,
        response_format=format_ if isinstance(format_, dict) else None,
    )


def _finish(pending: PendingResponse, choice: WholeChoice) -> dict[str, object]:
    """Build the complete response object. Changes: stores it for follow-ups, unless `store` is false."""
    is_cut = choice.finish_reason == "length"
    status = "incomplete" if is_cut else "completed"
    output: list[dict[str, object]] = [_message_item(pending, choice.text, status)] if choice.text else []
    output += [_call_item(call) for call in choice.calls]
    document = {
        **pending.head,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": _usage(pending.generation.stats),
    }
    if pending.body.store is not False:
        calls = [{k: v for k, v in call.items() if k != "index"} for call in choice.calls]
        answer = ChatMessage(role="assistant", content=choice.text, tool_calls=calls or None)
        entry = StoredResponse(
            document=document,
            messages=(*pending.messages, answer),
            cache_salt=pending.body.cache_salt or "",
        )
        pending.context.responses.put(str(pending.head["id"]), entry)
    return document


def _message_item(pending: PendingResponse, text: str, status: str) -> dict[str, object]:
    item_id = str(pending.head["id"]).replace("resp_", "msg_", 1)
    content = [] if status == "in_progress" else [_text_part(text)]
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": content}


def _text_part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(call: Mapping[str, Any]) -> dict[str, object]:
    function = call["function"]
    head = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed"}
    return {**head, "name": function["name"], "arguments": function["arguments"]}


def _usage(stats: RequestStats) -> dict[str, object]:
    return {
        "input_tokens": stats.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": stats.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": stats.num_prompt_tokens + stats.num_completion_tokens,
    }


class _Numbered:
    """Encodes named events with this API's sequence numbers."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, **fields: object) -> bytes:
        data = {"type": kind, "sequence_number": self._next, **fields}
        self._next += 1
        return event(data, name=kind)


async def _events(pending: PendingResponse) -> AsyncGenerator[bytes, None]:
    write = _Numbered().event
    whole = WholeChoice(index=0)
    empty = _message_item(pending, "", "in_progress")
    where = {"item_id": empty["id"], "output_index": 0, "content_index": 0}
    is_open = False
    parts_of = read_parts(pending.context.metrics, pending.generation, pending.form.tool_format)
    async with contextlib.aclosing(parts_of) as parts:
        async for part in parts:
            data = b""
            if not is_open:
                started = {**pending.head, "status": "in_progress", "output": []}
                data = write("response.created", response=started)
                data += write("response.in_progress", response=started)
                is_open = True
            if part.text and not whole.text:
                data += write("response.output_item.added", output_index=0, item=empty)
                data += write("response.content_part.added", **where, part=_text_part(""))
            if part.text:
                data += write("response.output_text.delta", **where, delta=part.text, logprobs=[])
            whole.text += part.text
            whole.calls += part.calls
            whole.finish_reason = part.finish_reason
            yield data
    document = _finish(pending, whole)
    yield _closing(write, document, where)


def _closing(write: Callable[..., bytes], document: dict[str, object], where: Mapping[str, object]) -> bytes:
    """The `done` events of all output items, then the whole response."""
    data = b""
    output = document["output"]
    assert isinstance(output, list)
    for index, item in enumerate(output):
        if item["type"] == "message":
            (part,) = item["content"]
            data += write("response.output_text.done", **where, text=part["text"], logprobs=[])
            data += write("response.content_part.done", **where, part=part)
        else:
            data += write("response.output_item.added", output_index=index, item=item)
        data += write("response.output_item.done", output_index=index, item=item)
    kind = "response.completed" if document["status"] == "completed" else "response.incomplete"
    return data + write(kind, response=document)
