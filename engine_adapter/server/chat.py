"""`POST /v1/chat/completions`: turns a request into a prompt and a generation.

Decides which chats are valid and how messages and tools become token ids. It does not know the shape of
answers (`chat_answer`), how text is generated (`generation`) or how errors are sent (`app`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

import msgspec
from aiohttp import web

from engine_adapter.engine.text.chat_template import MessagesUnsuitable
from engine_adapter.engine.text.reasoning import REASONING_START, ReasoningPlace, reasoning_place
from engine_adapter.engine.text.tool_prompt import with_tools_in_text
from engine_adapter.server.answer_form import AnswerForm, chat_answer_form, check_tools
from engine_adapter.server.chat_answer import AnswerStyle, answer_events, whole_answer
from engine_adapter.server.errors import bad_request, unsupported
from engine_adapter.server.event_stream import json_response, send_stream
from engine_adapter.server.generation import Generation, Prompt, TextOptions
from engine_adapter.server.protocol import ChatMessage, ChatRequest
from engine_adapter.server.request_body import read_body
from engine_adapter.server.sampling_options import (
    num_choices,
    num_top_logprobs,
    sampling_params,
    stop_strings,
)
from engine_adapter.server.serving import ServingContext, context_of, tags_of

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat."""
    context = context_of(request)
    body = await read_body(request, ChatRequest)
    check_chat(body)
    context.check_model(body.model)
    form = await chat_answer_form(body, context.grammars, context.template.source)
    generation = chat_generation(context, body, form, tags_of(request))
    style = AnswerStyle(
        response_id=f"chatcmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=body.model,
        wants_logprobs=bool(body.logprobs),
        wants_usage=bool(body.stream_options and body.stream_options.include_usage),
        tool_format=form.tool_format,
        reasoning_place=find_reasoning_place(context, generation, form),
    )
    if body.stream:
        return await send_stream(
            request, answer_events(context.metrics, context.tokenizer, generation, style)
        )
    return json_response(await whole_answer(context.metrics, context.tokenizer, generation, style))


def check_chat(body: ChatRequest) -> None:
    """Raise a 400 for invalid messages and for fields that this worker does not support."""
    check_messages(body.messages)
    check_tools(body)
    if body.functions:
        raise unsupported("functions", "the deprecated functions field")
    if body.audio is not None or set(body.modalities or ()) - {"text"}:
        raise unsupported("modalities", "any output other than text")
    if body.continue_final_message:
        raise unsupported("continue_final_message", "continuing the last message")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")


def check_messages(messages: list[ChatMessage]) -> None:
    """Raise a 400 that names the first invalid message."""
    if not messages:
        raise bad_request("messages must contain at least one message", param="messages")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            where = f"messages[{index}].role"
            raise bad_request(f"{where} must be one of {', '.join(ROLES)}", param=where, code="invalid_value")
        if message.content is None and message.role != "assistant":
            where = f"messages[{index}].content"
            raise bad_request(f"{where} is required", param=where, code="missing_required_parameter")


def render_prompt(
    context: ServingContext,
    messages: list[ChatMessage],
    *,
    tools: list[dict[str, object]] | None = None,
    add_generation_prompt: bool = True,
    variables: dict[str, object] | None = None,
) -> list[int]:
    """Turn messages into token ids with the checkpoint's template."""
    plain: list[dict[str, object]] = [msgspec.to_builtins(message) for message in messages]
    if not context.template.knows_tools:
        plain, tools = with_tools_in_text(plain, tools or ()), None
    try:
        text = context.template.render(
            plain,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
    except MessagesUnsuitable as error:
        raise bad_request(str(error), param="messages") from error
    return context.tokenizer.encode(text, add_special_tokens=False)


def chat_generation(
    context: ServingContext, body: ChatRequest, form: AnswerForm, tags: Mapping[str, str]
) -> Generation:
    """Build the generation that answers this chat."""
    token_ids = render_prompt(
        context,
        body.messages,
        tools=body.tools if body.tool_choice != "none" else None,
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=body.chat_template_kwargs,
    )
    top = num_top_logprobs("top_logprobs", body.top_logprobs)
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    sampling = sampling_params(
        body,
        context.limits,
        max_tokens=limit,
        num_prompt_tokens=len(token_ids),
        num_logprobs=top if body.logprobs else None,
        constraint=form.grammar,
    )
    options = TextOptions(
        stop=stop_strings(body),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False
        and not (form.tool_format is not None and form.tool_format.keeps_special_tokens),
    )
    prompt = Prompt(
        token_ids=token_ids,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        deadline_s=context.deadline_s(),
        session_tag=tags.get("session_tag"),
        group_tag=tags.get("group_tag"),
    )
    return Generation(
        context.engine, context.tokenizer, [prompt], sampling, options, num_choices=num_choices(body)
    )


def find_reasoning_place(context: ServingContext, generation: Generation, form: AnswerForm) -> ReasoningPlace:
    """Where this answer has its reasoning; a grammar leaves no room for it if the prompt has opened it."""
    last_ids = generation.prompt_tail(len(REASONING_START) + 1)
    tail = context.tokenizer.decode(last_ids, skip_special_tokens=False)
    place = reasoning_place(context.template.source, tail)
    if place is ReasoningPlace.OPENED and form.grammar is not None:
        return ReasoningPlace.NOWHERE
    return place
