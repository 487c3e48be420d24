"""`POST /v1/chat/completions`: messages in, one or several answers out, whole or streamed.

Decides the shape of chat answers. The stream opens with the role, carries text deltas, ends each choice
with its finish reason, then the usage where asked, then `[DONE]`.
It does not know how text is made (`generation`) nor what becomes of errors (`app`).
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec
from aiohttp import web

from engine_adapter.engine.chat_template import MessagesUnsuitable
from engine_adapter.server.accounting import accounted_pieces, usage_of
from engine_adapter.server.errors import bad_request, unsupported
from engine_adapter.server.event_stream import DONE, event, send_stream
from engine_adapter.server.generation import Generation, Prompt, SampledToken, TextOptions
from engine_adapter.server.logprobs import chat_logprobs
from engine_adapter.server.protocol import ChatMessage, ChatRequest
from engine_adapter.server.request_body import read_body
from engine_adapter.server.sampling_options import (
    num_choices,
    num_top_logprobs,
    sampling_params,
    stop_strings,
)
from engine_adapter.server.serving import ServingContext, context_of

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What all chunks of one answer have in common."""

    response_id: str
    created: int
    model: str
    wants_logprobs: bool

    def chunk(self, **fields: object) -> dict[str, object]:
        head = {"id": self.response_id, "object": "chat.completion.chunk", "created": self.created}
        return {**head, "model": self.model, **fields}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat."""
    context = context_of(request)
    body = await read_body(request, ChatRequest)
    check_messages(body.messages)
    _refuse_unsupported(body)
    context.check_model(body.model)
    generation = _generation(context, body)
    answer = Answer(
        response_id=f"chatcmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=body.model,
        wants_logprobs=bool(body.logprobs),
    )
    if body.stream:
        wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        return await send_stream(request, _events(context, generation, answer, wants_usage))
    return await _whole(context, generation, answer)


def check_messages(messages: list[ChatMessage]) -> None:
    """Raise a 400 that names the first message that no chat may hold."""
    if not messages:
        raise bad_request("messages must hold at least one message", param="messages")
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
    """Messages to token ids, by the checkpoint's template."""
    try:
        text = context.template.render(
            [msgspec.to_builtins(message) for message in messages],
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
    except MessagesUnsuitable as error:
        raise bad_request(str(error), param="messages") from error
    return context.tokenizer.encode(text, add_special_tokens=False)


def _refuse_unsupported(body: ChatRequest) -> None:
    if body.functions:
        raise unsupported("functions", "the deprecated functions field")
    if body.audio is not None or set(body.modalities or ()) - {"text"}:
        raise unsupported("modalities", "any output other than text")
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")


def _generation(context: ServingContext, body: ChatRequest) -> Generation:
    token_ids = render_prompt(
        context,
        body.messages,
        tools=body.tools,
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
    )
    options = TextOptions(
        stop=stop_strings(body),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    prompt = Prompt(
        token_ids=token_ids,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        deadline_s=context.deadline_s(),
    )
    return Generation(
        context.engine, context.tokenizer, [prompt], sampling, options, num_choices=num_choices(body)
    )


async def _whole(context: ServingContext, generation: Generation, answer: Answer) -> web.Response:
    texts: dict[int, list[str]] = {}
    tokens: dict[int, list[SampledToken]] = {}
    reasons: dict[int, str | None] = {}
    async with contextlib.aclosing(accounted_pieces(context.metrics, generation, "messages")) as pieces:
        async for piece in pieces:
            texts.setdefault(piece.index, []).append(piece.text)
            tokens.setdefault(piece.index, []).extend(piece.tokens)
            reasons[piece.index] = piece.finish_reason
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": "".join(texts[index])},
            "logprobs": _logprobs(context, answer, tokens[index]),
            "finish_reason": reasons[index],
        }
        for index in sorted(texts)
    ]
    document = {**answer.chunk(), "object": "chat.completion", "choices": choices}
    document |= {"usage": usage_of(generation.tally), "homing": generation.tally.milliseconds()}
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")


async def _events(
    context: ServingContext, generation: Generation, answer: Answer, wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    extra: dict[str, object] = {"usage": None} if wants_usage else {}
    opened: set[int] = set()
    async with contextlib.aclosing(accounted_pieces(context.metrics, generation, "messages")) as pieces:
        async for piece in pieces:
            data = b""
            if piece.index not in opened:
                opened.add(piece.index)
                data += event(
                    answer.chunk(choices=[_delta(piece.index, role="assistant", content="")], **extra)
                )
            if piece.text or piece.tokens:
                choice = _delta(piece.index, content=piece.text)
                choice["logprobs"] = _logprobs(context, answer, piece.tokens)
                data += event(answer.chunk(choices=[choice], **extra))
            if piece.finish_reason is not None:
                choice = {**_delta(piece.index), "finish_reason": piece.finish_reason}
                data += event(answer.chunk(choices=[choice], **extra))
            yield data
    if wants_usage:
        usage, timing = usage_of(generation.tally), generation.tally.milliseconds()
        yield event(answer.chunk(choices=[], usage=usage, homing=timing))
    yield DONE


def _delta(index: int, **delta: object) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _logprobs(
    context: ServingContext, answer: Answer, tokens: list[SampledToken] | tuple[SampledToken, ...]
) -> dict[str, object] | None:
    return chat_logprobs(context.tokenizer, tokens) if answer.wants_logprobs else None
