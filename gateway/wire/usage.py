"""Converts the token counts of all dialects to one `Usage`.

OpenAI includes cached tokens in `prompt_tokens`; Anthropic reports them separately from `input_tokens`, so
its three parts are added up. `None` means not reported, which is different from 0. Knows nothing about
transport.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.values import Usage

UNSEEN_TOKENS: Final = 65_536
"""How many tokens an answer may report that none of its bytes show: images by address, templates, hidden
reasoning. One image is up to 16,384 (Qwen2-VL)."""
STORED_TOKENS: Final = 1 << 20
"""The same of a prompt that continues a stored answer: the longest context of any model."""


class Details(msgspec.Struct, gc=False):
    """`prompt_tokens_details` and `input_tokens_details`."""

    cached_tokens: int | None = None


class WireUsage(msgspec.Struct, gc=False):
    """A usage object in any dialect."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cached_tokens: int | None = None  # SGLang's `meta_info`


def merge_usage(known: Usage, said: WireUsage) -> Usage:
    """Return `known` updated with the counts in `said`: later events have later counts."""
    prompt_tokens = said.prompt_tokens if said.input_tokens is None else _input(known, said)
    completion_tokens = said.output_tokens if said.completion_tokens is None else said.completion_tokens
    cached_tokens = _cached(said)
    return Usage(
        prompt_tokens=known.prompt_tokens if prompt_tokens is None else prompt_tokens,
        completion_tokens=known.completion_tokens if completion_tokens is None else completion_tokens,
        cached_tokens=known.cached_tokens if cached_tokens is None else cached_tokens,
    )


def plausible(usage: Usage, max_prompt_tokens: int, max_completion_tokens: int) -> Usage:
    """Return what can be true of a report: a token is a byte at least, and none is less than nothing.

    An engine that reports nonsense once must not cost a tenant its limits, or a session its context length.
    """
    prompt, completion, cached = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
    if (
        0 <= (cached or 0) <= (prompt or 0) <= max_prompt_tokens
        and 0 <= (completion or 0) <= max_completion_tokens
    ):
        return usage
    prompt_tokens = _within(prompt, max_prompt_tokens)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=_within(completion, max_completion_tokens),
        cached_tokens=_within(cached, prompt_tokens or 0),
    )


def _within(count: int | None, limit: int) -> int | None:
    return None if count is None or count < 0 else min(count, limit)


def _input(known: Usage, said: WireUsage) -> int:
    """Return all input tokens. An event that repeats only `input_tokens` does not reduce the total."""
    total = said.input_tokens or 0
    if said.cache_read_input_tokens is None and said.cache_creation_input_tokens is None:
        return max(total, known.prompt_tokens or 0)
    return total + (said.cache_read_input_tokens or 0) + (said.cache_creation_input_tokens or 0)


def _cached(said: WireUsage) -> int | None:
    for details in (said.prompt_tokens_details, said.input_tokens_details):
        if details is not None and details.cached_tokens is not None:
            return details.cached_tokens
    return said.cached_tokens if said.cache_read_input_tokens is None else said.cache_read_input_tokens
