"""Request bodies of the OpenAI API, as types.

Decides which fields are read and their types; `null` counts as absent, because OpenAI's own clients send it.
Unknown fields are ignored, because clients add their own; known fields that would change the answer and that
this worker does not support are refused by the handlers.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class CarriedFields(msgspec.Struct, kw_only=True):
    """Fields that every dialect has under the same name, and that a conversion to a chat keeps: `carried`.

    A field that all dialects should heed belongs here. One that is added to a single dialect would be lost on
    the way from another, and a lost `cache_salt` lets tenants share a cache.
    """

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    stream: bool | None = None


def carried(body: CarriedFields) -> dict[str, Any]:
    """Return the fields that the body has in common with all other dialects."""
    return {name: getattr(body, name) for name in CarriedFields.__struct_fields__}


class SamplingFields(CarriedFields, kw_only=True):
    """Fields of chat and text completions that other dialects spell in their own way, or lack."""

    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[Any]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]
