"""Log-probabilities in the two shapes that OpenAI has: chat's and the older one of text completions."""

from __future__ import annotations

from collections.abc import Sequence

from engine_adapter.engine.tokenizer import Tokenizer
from engine_adapter.server.generation import SampledToken

FLOOR = -9999.0  # JSON has no infinity; OpenAI reports very unlikely tokens so


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[SampledToken]) -> dict[str, object]:
    """`{"content": [{token, logprob, bytes, top_logprobs}, …]}`."""
    content = []
    for token in tokens:
        top = [_chat_entry(tokenizer, token_id, value) for token_id, value in token.logprobs.top]
        content.append(
            {**_chat_entry(tokenizer, token.token_id, token.logprobs.logprob), "top_logprobs": top}
        )
    return {"content": content}


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": tokenizer.token_text(token_id), "logprob": max(logprob, FLOOR), "bytes": list(raw)}


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[SampledToken], *, text_offset: int
) -> dict[str, object]:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`, parallel lists."""
    texts = [tokenizer.token_text(token.token_id) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(text_offset)
        text_offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(token.logprobs.logprob, FLOOR) for token in tokens],
        "top_logprobs": [
            {tokenizer.token_text(token_id): max(value, FLOOR) for token_id, value in token.logprobs.top}
            for token in tokens
        ],
        "text_offset": offsets,
    }
