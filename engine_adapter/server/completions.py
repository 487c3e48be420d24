"""`POST /v1/completions`: continues raw prompts, whole or streamed.

Decides the forms a prompt may have (text, token ids, or a list of either) and the shape of the answers.
`echo` puts the prompt's text in front, with its log-probabilities if requested; then `max_tokens` may be 0.
It does not use templates: the text is the prompt.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace

from aiohttp import web

from engine_adapter.engine.model.sampling import SamplingParams
from engine_adapter.server.accounting import accounted_pieces, usage_of
from engine_adapter.server.answer_form import AnswerForm, answer_form
from engine_adapter.server.errors import bad_request, unsupported
from engine_adapter.server.event_stream import DONE, event, json_response, send_stream
from engine_adapter.server.generation import Generation, Prompt, ShownToken, TextOptions
from engine_adapter.server.logprobs import completion_logprobs
from engine_adapter.server.protocol import CompletionRequest
from engine_adapter.server.request_body import read_body
from engine_adapter.server.sampling_options import (
    num_choices,
    num_top_logprobs,
    sampling_params,
    stop_strings,
)
from engine_adapter.server.serving import ServingContext, context_of, tags_of

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint
MAX_PROMPTS = 256


@dataclass(slots=True, kw_only=True)
class Answer:
    """What the chunks of one answer share, and the length of each choice's text so far."""

    head: dict[str, object]
    wants_logprobs: bool
    echoes: dict[int, str]  # choice index to prompt text, if requested
    offsets: dict[int, int] = field(default_factory=dict)

    def choice(
        self, context: ServingContext, index: int, text: str, tokens: list[ShownToken], reason: str | None
    ) -> dict[str, object]:
        """One choice entry. Changes: the offset of the choice grows by the text."""
        offset = self.offsets.get(index, 0)
        self.offsets[index] = offset + len(text)
        logprobs = None
        if self.wants_logprobs:
            logprobs = completion_logprobs(context.tokenizer, tokens, text_offset=offset)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or more prompts."""
    context = context_of(request)
    body = await read_body(request, CompletionRequest)
    prompts = _token_prompts(context, body)
    _refuse_unsupported(body)
    context.check_model(body.model)
    form = await answer_form(body, context.grammars)
    generation = _generation(context, body, prompts, form, tags_of(request))
    answer = Answer(
        head={
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
        },
        wants_logprobs=body.logprobs is not None,
        echoes=_echoes(context, body, prompts) if body.echo else {},
    )
    if body.stream:
        wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        return await send_stream(request, _events(context, generation, answer, wants_usage))
    return await _whole(context, generation, answer)


def _token_prompts(context: ServingContext, body: CompletionRequest) -> list[list[int]]:
    """Return `prompt`, in any valid form, as lists of token ids."""
    raw = body.prompt
    many = raw if isinstance(raw, list) and raw and not isinstance(raw[0], int) else [raw]
    if not 0 < len(many) <= MAX_PROMPTS:
        raise bad_request(f"prompt: at most {MAX_PROMPTS} prompts, got {len(many)}", param="prompt")
    return [_token_prompt(context, prompt, body.add_special_tokens is not False) for prompt in many]


def _token_prompt(context: ServingContext, prompt: object, add_special_tokens: bool) -> list[int]:
    token_ids: list[int]
    if isinstance(prompt, str):
        token_ids = context.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    elif isinstance(prompt, list) and all(type(item) is int for item in prompt):
        token_ids = prompt
    else:
        raise bad_request("prompt must be a string, a list of token ids, or a list of these", param="prompt")
    if not token_ids:
        raise bad_request("prompt must not be empty", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= context.limits.vocab_size:
        last = context.limits.vocab_size - 1
        raise bad_request(f"prompt: token ids must be between 0 and {last}", param="prompt")
    return token_ids


def _refuse_unsupported(body: CompletionRequest) -> None:
    if body.suffix:
        raise unsupported("suffix", "filling in the middle")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "best_of different from n")


def _echoes(context: ServingContext, body: CompletionRequest, prompts: list[list[int]]) -> dict[int, str]:
    count = num_choices(body)
    texts = [context.tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
    return {index: texts[index // count] for index in range(count * len(prompts))}


def _generation(
    context: ServingContext,
    body: CompletionRequest,
    prompts: list[list[int]],
    form: AnswerForm,
    tags: Mapping[str, str],
) -> Generation:
    sampling = _sampling(context, body, max(len(prompt) for prompt in prompts), form)
    options = TextOptions(
        stop=stop_strings(body),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        is_prompt_only=_is_prompt_only(body),
    )
    deadline_s = context.deadline_s()
    asked = [
        Prompt(
            token_ids=token_ids,
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            deadline_s=deadline_s,
            session_tag=tags.get("session_tag"),
            group_tag=tags.get("group_tag"),
        )
        for token_ids in prompts
    ]
    return Generation(
        context.engine, context.tokenizer, asked, sampling, options, num_choices=num_choices(body)
    )


def _sampling(
    context: ServingContext, body: CompletionRequest, num_prompt_tokens: int, form: AnswerForm
) -> SamplingParams:
    max_tokens = body.max_tokens if body.max_tokens is not None else DEFAULT_MAX_TOKENS
    num_logprobs = None if body.logprobs is None else num_top_logprobs("logprobs", body.logprobs)
    sampling = sampling_params(
        body,
        context.limits,
        max_tokens=1 if _is_prompt_only(body) else max_tokens,
        num_prompt_tokens=num_prompt_tokens,
        num_logprobs=num_logprobs,
        constraint=form.grammar,
    )
    return replace(sampling, num_prompt_logprobs=num_logprobs if body.echo else None)


def _is_prompt_only(body: CompletionRequest) -> bool:
    """Whether only the prompt is requested: evaluation harnesses score texts this way."""
    return bool(body.echo) and body.max_tokens == 0


async def _whole(context: ServingContext, generation: Generation, answer: Answer) -> web.Response:
    texts: dict[int, list[str]] = {}
    tokens: dict[int, list[ShownToken]] = {}
    reasons: dict[int, str | None] = {}
    async with contextlib.aclosing(accounted_pieces(context.metrics, generation, "prompt")) as pieces:
        async for piece in pieces:
            texts.setdefault(piece.index, [answer.echoes.get(piece.index, "")]).append(piece.text)
            tokens.setdefault(piece.index, []).extend(piece.tokens)
            reasons[piece.index] = piece.finish_reason
    choices = [
        answer.choice(context, index, "".join(texts[index]), tokens[index], reasons[index])
        for index in sorted(texts)
    ]
    document = {**answer.head, "choices": choices, "usage": usage_of(generation.stats)}
    document["homing"] = generation.stats.extension()
    return json_response(document)


async def _events(
    context: ServingContext, generation: Generation, answer: Answer, wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    extra: dict[str, object] = {"usage": None} if wants_usage else {}
    async with contextlib.aclosing(accounted_pieces(context.metrics, generation, "prompt")) as pieces:
        async for piece in pieces:
            text = answer.echoes.pop(piece.index, "") + piece.text
            choice = answer.choice(context, piece.index, text, list(piece.tokens), piece.finish_reason)
            yield event({**answer.head, "choices": [choice], **extra})
    if wants_usage:
        usage, extension = usage_of(generation.stats), generation.stats.extension()
        yield event({**answer.head, "choices": [], "usage": usage, "homing": extension})
    yield DONE
