"""Log-probabilities in OpenAI's two formats: that of chats and the older one of text completions."""

from __future__ import annotations

from collections.abc import Sequence

from engine_adapter.engine.text.tokenizer import Tokenizer
from engine_adapter.server.generation import ShownToken

FLOOR = -9999.0  # OpenAI's value for very unlikely tokens; JSON has no infinity


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[ShownToken]) -> dict[str, object]:
    """`{"content": [{token, logprob, bytes, top_logprobs}, …]}`."""
    content = []
    for token in tokens:
        assert token.logprobs is not None, "a chat does not show its prompt"
        top = [_chat_entry(tokenizer, token_id, value) for token_id, value in token.logprobs.top]
        content.append(
            {**_chat_entry(tokenizer, token.token_id, token.logprobs.logprob), "top_logprobs": top}
        )
    return {"content": content}


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, object]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": tokenizer.token_text(token_id), "logprob": max(logprob, FLOOR), "bytes": list(raw)}


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[ShownToken], *, text_offset: int
) -> dict[str, object]:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`, parallel lists."""
    texts = [tokenizer.token_text(token.token_id) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(text_offset)
        text_offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [
            None if token.logprobs is None else max(token.logprobs.logprob, FLOOR) for token in tokens
        ],
        "top_logprobs": [_best_texts(tokenizer, token) for token in tokens],
        "text_offset": offsets,
    }


def _best_texts(tokenizer: Tokenizer, token: ShownToken) -> dict[str, float] | None:
    """The best tokens and the chosen one, which OpenAI's older endpoint always adds."""
    if token.logprobs is None:
        return None
    best = {tokenizer.token_text(token.token_id): max(token.logprobs.logprob, FLOOR)}
    for token_id, value in token.logprobs.top:  # parts of characters may have equal texts: keep the first
        best.setdefault(tokenizer.token_text(token_id), max(value, FLOOR))
    return best
