"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's dialect of the same chat.

Decides how its shapes map to ours and back: system and blocks become messages, `tool_use` and `tool_result`
become tool calls and tool messages, and usage splits the prompt into computed and cached tokens
(`input_tokens` excludes cached ones, as Anthropic counts). Images are refused.

`thinking` sets the switch of templates that have one. For other models `enabled` is accepted without effect,
because agents send it to every model. `adaptive`, or no field, leaves it to the template. Budgets are not
enforced. Reasoning is sent in thinking blocks with an empty signature; nothing here checks signatures.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web

from engine_adapter.server.answer_form import AnswerForm, chat_answer_form
from engine_adapter.server.chat import chat_generation, check_chat, find_reasoning_place, render_prompt
from engine_adapter.server.chat_answer import collect_choices, read_parts
from engine_adapter.server.errors import bad_request
from engine_adapter.server.event_stream import event, json_response, send_stream
from engine_adapter.server.generation import Generation, RequestStats
from engine_adapter.server.protocol import CarriedFields, ChatMessage, ChatRequest, carried
from engine_adapter.server.request_body import read_body
from engine_adapter.server.serving import ServingContext, context_of, tags_of

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

Block = Mapping[str, Any]


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[dict[str, Any]]


class Thinking(msgspec.Struct, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class MessagesRequest(CarriedFields, kw_only=True):
    messages: list[Message]
    max_tokens: int | None = None  # required by the API, absent when only counting
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer in Anthropic's shape."""
    context = context_of(request)
    body = await read_body(request, MessagesRequest)
    if body.max_tokens is None:
        raise bad_request("max_tokens is required", param="max_tokens", code="missing_required_parameter")
    chat = _as_chat(body, context)
    check_chat(chat)
    context.check_model(chat.model)
    form = await chat_answer_form(chat, context.grammars, context.template.source)
    generation = chat_generation(context, chat, form, tags_of(request))
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": chat.model}
    if body.stream:
        return await send_stream(request, _events(context, generation, form, head))
    reasoning_place = find_reasoning_place(context, generation, form)
    (choice,) = await collect_choices(context.metrics, generation, form.tool_format, reasoning_place)
    content: list[dict[str, object]] = []
    if choice.reasoning:
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.text:
        content.append({"type": "text", "text": choice.text})
    content += [_tool_use(call) for call in choice.calls]
    ending = _ending(choice.finish_reason, choice.stop_string)
    return json_response({**head, "content": content, **ending, "usage": _usage(generation.stats)})


async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens of a prompt without answering it."""
    context = context_of(request)
    chat = _as_chat(await read_body(request, MessagesRequest), context)
    check_chat(chat)
    token_ids = render_prompt(context, chat.messages, tools=chat.tools, variables=chat.chat_template_kwargs)
    return json_response({"input_tokens": len(token_ids)})


def _as_chat(body: MessagesRequest, context: ServingContext) -> ChatRequest:
    _check_thinking(body)
    chat: list[ChatMessage] = []
    if body.system:
        chat.append(ChatMessage(role="system", content=body.system))
    for index, message in enumerate(body.messages):
        if message.role not in ("user", "assistant"):
            where = f"messages[{index}].role"
            raise bad_request(f"{where} must be user or assistant", param=where, code="invalid_value")
        chat.extend(_chat_messages(message))
    return ChatRequest(
        **carried(body),
        messages=chat,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=_tool_choice(body.tool_choice),
        chat_template_kwargs=_thinking_switch(body) if context.template.has_thinking_switch else None,
    )


def _thinking_switch(body: MessagesRequest) -> dict[str, Any] | None:
    """The template's variable; None leaves the choice to the template."""
    if body.thinking is None or body.thinking.type == "adaptive":
        return None
    return {"enable_thinking": body.thinking.type == "enabled"}


def _check_thinking(body: MessagesRequest) -> None:
    """Raise a 400 for a budget that Anthropic's API would also refuse."""
    thinking = body.thinking
    if thinking is None or thinking.type != "enabled":
        return
    if thinking.budget_tokens is None:
        param = "thinking.budget_tokens"
        raise bad_request(f"{param} is required", param=param, code="missing_required_parameter")
    if body.max_tokens is not None and thinking.budget_tokens >= body.max_tokens:
        message = "thinking.budget_tokens must be less than max_tokens"
        raise bad_request(message, param="thinking.budget_tokens", code="invalid_value")


def _chat_messages(message: Message) -> list[ChatMessage]:
    """Convert one message; it may become several, because each tool result is its own message."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    results = [
        ChatMessage(
            role="tool", tool_call_id=str(block.get("tool_use_id")), content=block.get("content") or ""
        )
        for block in message.content
        if block.get("type") == "tool_result"
    ]
    calls = [_call(block) for block in message.content if block.get("type") == "tool_use"]
    hidden = ("tool_result", "tool_use", "thinking", "redacted_thinking")
    rest = [block for block in message.content if block.get("type") not in hidden]
    if rest or calls or not results:
        reasoning = [
            str(block.get("thinking", "")) for block in message.content if block.get("type") == "thinking"
        ]
        results.append(
            ChatMessage(
                role=message.role,
                content=rest,
                tool_calls=calls or None,
                reasoning_content="".join(reasoning) or None,
            )
        )
    return results


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool(tool: Block) -> dict[str, Any]:
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Block | None) -> str | dict[str, Any] | None:
    kind = (choice or {}).get("type")
    if kind == "tool" and choice is not None:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {"any": "required", "none": "none"}.get(str(kind))


def _tool_use(call: Mapping[str, Any]) -> dict[str, object]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = {}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _ending(reason: str | None, stop_string: str | None) -> dict[str, object]:
    if stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
    return {"stop_reason": STOP_REASONS.get(reason or "stop"), "stop_sequence": None}


def _usage(stats: RequestStats) -> dict[str, int]:
    return {
        "input_tokens": stats.num_prompt_tokens - stats.num_cached_tokens,
        "cache_read_input_tokens": stats.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": stats.num_completion_tokens,
    }


class BlockWriter:
    """Opens and closes numbered content blocks; at most one is open."""

    def __init__(self) -> None:
        self._index = -1
        self._open_type: str | None = None

    def thinking(self, reasoning: str) -> bytes:
        block = {"type": "thinking", "thinking": "", "signature": ""}
        return self._opened(block) + self._delta({"type": "thinking_delta", "thinking": reasoning})

    def text(self, text: str) -> bytes:
        return self._opened({"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": text})

    def tool_use(self, call: Mapping[str, Any]) -> bytes:
        block = {**_tool_use(call), "input": {}}
        arguments = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
        return self.close() + self._start(block) + self._delta(arguments) + self._stop()

    def close(self) -> bytes:
        if self._open_type is None:
            return b""
        self._open_type = None
        return self._stop()

    def _opened(self, block: Mapping[str, str]) -> bytes:
        """Open a block unless one of its type is open."""
        if self._open_type == block["type"]:
            return b""
        data = self.close() + self._start(block)
        self._open_type = block["type"]
        return data

    def _start(self, block: Mapping[str, object]) -> bytes:
        self._index += 1
        return named("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: Mapping[str, object]) -> bytes:
        return named("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> bytes:
        return named("content_block_stop", index=self._index)


def named(kind: str, **fields: object) -> bytes:
    """Encode an event with its name repeated in the data, as this API does."""
    return event({"type": kind, **fields}, name=kind)


async def _events(
    context: ServingContext,
    generation: Generation,
    form: AnswerForm,
    head: Mapping[str, object],
) -> AsyncGenerator[bytes, None]:
    writer = BlockWriter()
    is_open = False
    reasoning_place = find_reasoning_place(context, generation, form)
    read = read_parts(context.metrics, generation, form.tool_format, reasoning_place)
    async with contextlib.aclosing(read) as parts:
        async for part in parts:
            if not is_open:  # not earlier: the first part brings the number of cached tokens
                start: dict[str, object] = {"content": [], "stop_reason": None, "stop_sequence": None}
                usage = {**_usage(generation.stats), "output_tokens": 1}
                yield named("message_start", message={**head, **start, "usage": usage})
                is_open = True
            if part.reasoning:
                yield writer.thinking(part.reasoning)
            if part.text:
                yield writer.text(part.text)
            for call in part.calls:
                yield writer.tool_use(call)
            if part.finish_reason is not None:
                delta = _ending(part.finish_reason, part.stop_string)
                closing = named("message_delta", delta=delta, usage=_usage(generation.stats))
                yield writer.close() + closing
    yield named("message_stop")
