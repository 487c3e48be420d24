"""Checks the sampling fields of a request and builds `SamplingParams`.

Decides the valid range of every parameter and the defaults (the request, then the checkpoint's
recommendation, then OpenAI's). Invariant: whatever passes here, the sampler can execute. Of the prompt it
only knows the length.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_adapter.engine.checkpoint.loader import GenerationDefaults
from engine_adapter.engine.model.sampling import MAX_TOP_LOGPROBS, SamplingParams, TokenConstraintSource
from engine_adapter.server.errors import bad_request
from engine_adapter.server.protocol import SamplingFields

MAX_CHOICES = 64  # each choice holds memory from the start
MAX_STOP_STRINGS = 16  # OpenAI allows 4; agents send more


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """Limits and defaults of the model."""

    vocab_size: int
    context_tokens: int
    stop_token_ids: frozenset[int]
    defaults: GenerationDefaults


def sampling_params(
    fields: SamplingFields,
    limits: SamplingLimits,
    *,
    max_tokens: int | None,
    num_prompt_tokens: int,
    num_logprobs: int | None,
    constraint: TokenConstraintSource | None = None,
) -> SamplingParams:
    """Check the fields and combine them with the defaults.

    Raises:
        ApiError: 400 with the offending field.
    """
    defaults = limits.defaults
    room = _room_for_answer(fields, limits, num_prompt_tokens)
    if max_tokens is not None:
        _check("max_tokens", max_tokens, 1, None)
    _check_penalties(fields)
    stops = frozenset(fields.stop_token_ids or ())
    for token_id in stops:
        _check("stop_token_ids", token_id, 0, limits.vocab_size - 1)
    wanted = max_tokens if max_tokens is not None else defaults.max_new_tokens
    min_tokens = _check("min_tokens", fields.min_tokens or 0, 0, wanted if wanted is not None else room)
    return SamplingParams(
        max_tokens=min(wanted, room) if wanted is not None else room,
        min_tokens=int(min_tokens),
        temperature=_or_default("temperature", fields.temperature, defaults.temperature, 0, 2),
        top_p=_or_default("top_p", fields.top_p, defaults.top_p, 0, 1),
        top_k=max(int(_or_default("top_k", fields.top_k, defaults.top_k, -1, None)), 0),
        min_p=_or_default("min_p", fields.min_p, defaults.min_p, 0, 1),
        seed=fields.seed,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_or_default(
            "repetition_penalty", fields.repetition_penalty, defaults.repetition_penalty, 0.01, 10
        ),
        logit_bias=_logit_bias(fields, limits.vocab_size),
        num_logprobs=num_logprobs,
        # a finished grammar allows only stop tokens
        stop_token_ids=stops if fields.ignore_eos and constraint is None else stops | limits.stop_token_ids,
        constraint=constraint,
    )


def _room_for_answer(fields: SamplingFields, limits: SamplingLimits, num_prompt_tokens: int) -> int:
    """Return how many tokens the context leaves for the answer, or raise a 400 if none."""
    room = limits.context_tokens - num_prompt_tokens
    if room < 1:
        raise bad_request(
            f"the prompt has {num_prompt_tokens} tokens; this model's context is {limits.context_tokens} "
            "tokens, prompt and answer together",
            param="messages" if hasattr(fields, "messages") else "prompt",
            code="context_length_exceeded",
        )
    return room


def stop_strings(fields: SamplingFields) -> list[str]:
    """The `stop` field as a list without empty strings."""
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stops) > MAX_STOP_STRINGS:
        raise bad_request(f"stop: at most {MAX_STOP_STRINGS} strings, got {len(stops)}", param="stop")
    return [stop for stop in stops if stop]


def num_choices(fields: SamplingFields) -> int:
    """The `n` field, checked."""
    return int(_check("n", 1 if fields.n is None else fields.n, 1, MAX_CHOICES))


def num_top_logprobs(param: str, value: int | None) -> int:
    """A number of alternatives, checked."""
    return int(_check(param, value or 0, 0, MAX_TOP_LOGPROBS))


def _check_penalties(fields: SamplingFields) -> None:
    _check("presence_penalty", fields.presence_penalty or 0.0, -2, 2)
    _check("frequency_penalty", fields.frequency_penalty or 0.0, -2, 2)


def _logit_bias(fields: SamplingFields, vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (fields.logit_bias or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= vocab_size:
            raise bad_request(f"logit_bias: {key[:50]!r} is not a token id of this model", param="logit_bias")
        bias[int(key)] = _check("logit_bias", value, -100, 100)
    return bias


def _or_default(
    name: str, value: float | None, default: float, low: float | None, high: float | None
) -> float:
    return default if value is None else _check(name, value, low, high)


def _check(name: str, value: float, low: float | None, high: float | None) -> float:
    """Return the value, or raise a 400 that names the field and its range."""
    if (low is not None and value < low) or (high is not None and value > high):
        shown_range = f"at least {low}" if high is None else f"between {low} and {high}"
        raise bad_request(f"{name} must be {shown_range}, got {value}", param=name, code="invalid_value")
    return value
