"""How an engine with a prefix cache answers: tokens it has seen are cached, the others take time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from fakes.backend import Behaviour, Turn, chat_events, stream

BYTES_PER_TOKEN = 4


def caching_answer(*, prefill_s: Callable[[int], float] = lambda tokens: 0.0) -> Behaviour:
    """A streamed chat answer whose usage tells what this backend had in cache.

    `prefill_s`: how long that many uncached tokens take; by default no time at all.
    """
    known: set[str] = set()

    async def behave(turn: Turn) -> None:
        messages = turn.request.json["messages"]
        assert isinstance(messages, list)
        prompt_tokens = cached_tokens = 0
        prefix, is_cached = "", True
        for message in messages:
            prefix += json.dumps(message)
            tokens = max(1, len(json.dumps(message)) // BYTES_PER_TOKEN)
            is_cached = is_cached and prefix in known
            prompt_tokens += tokens
            cached_tokens += tokens if is_cached else 0
            known.add(prefix)
        await asyncio.sleep(prefill_s(prompt_tokens - cached_tokens))
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 6,
            "total_tokens": prompt_tokens + 6,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        await stream(*chat_events("It is in the harbour .", usage, turn.backend.model))(turn)

    return behave
