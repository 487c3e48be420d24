"""Requests as real clients send them: each is one fixture, and the facts that must come out of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.values import Api, KeySource, RequestFacts

Parse = Callable[..., RequestFacts]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One client's request and what is expected of it."""

    api: Api
    headers: dict[str, str]
    body: dict[str, Any]
    source: KeySource
    session: str | None = None  # the id whose key it must be
    is_follow_up: bool = False
    max_output_tokens: int | None = None
    num_prefix: int = 0
    has_group: bool = True


LONG = "What is wrong with this function, and how would you test it?"

SHAPES = {
    "openai-python": Shape(
        api=Api.CHAT,
        headers={
            "Accept": "application/json",
            "User-Agent": "OpenAI/Python 2.8.0",
            "Authorization": "Bearer sk-x",
            "X-Stainless-Lang": "python",
            "X-Stainless-Async": "false",
            "x-stainless-retry-count": "0",
            "x-stainless-read-timeout": "600",
        },
        body={
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [
                {"role": "developer", "content": "sys"},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "hi"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                    ],
                },
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"a":1}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "42"},
            ],
            "prompt_cache_key": "bucket-7",
            "safety_identifier": "u-hash",
            "metadata": {"chat": "c1"},
            "seed": 123456789012345678,
        },
        source=KeySource.PROMPT_CACHE_KEY,
        is_follow_up=True,
        num_prefix=4,
    ),
    "codex": Shape(
        api=Api.RESPONSES,
        headers={
            "session-id": "s1",
            "thread-id": "t1",
            "originator": "codex_cli_rs",
            "x-client-request-id": "t1",
        },
        body={
            "model": "m",
            "instructions": "You are a coding agent.",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": LONG}]},
                {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "ok"},
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
            ],
            "tools": [{"type": "function", "name": "shell", "strict": False, "parameters": {}}],
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "s1",
        },
        source=KeySource.HEADER,
        session="t1",
        is_follow_up=True,
        num_prefix=5,
    ),
    "codex-older": Shape(
        api=Api.RESPONSES,
        headers={"session_id": "s1", "originator": "codex_cli_rs"},
        body={"model": "m", "instructions": "x", "input": "hi", "stream": True, "max_output_tokens": 9},
        source=KeySource.HEADER,
        session="s1",
        max_output_tokens=9,
        num_prefix=2,
    ),
    "claude-code": Shape(
        api=Api.MESSAGES,
        headers={"x-api-key": "k", "anthropic-version": "2023-06-01", "X-Claude-Code-Session-Id": "54c1eb09"},
        body={
            "model": "m",
            "max_tokens": 32000,
            "stream": True,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.177.01c; cch=36ee5;"},
                {"type": "text", "text": "You are Claude Code", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t1",
                            "content": [{"type": "text", "text": "ok"}],
                        }
                    ],
                }
            ],
            "tools": [{"name": "Bash", "input_schema": {}}],
            "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"another"}'},
        },
        source=KeySource.HEADER,
        session="54c1eb09",
        max_output_tokens=32000,
        num_prefix=2,
    ),
    "claude-code-without-header": Shape(
        api=Api.MESSAGES,
        headers={"authorization": "Bearer k"},
        body={
            "model": "m",
            "max_tokens": 1,
            "stream": True,
            "messages": [{"role": "user", "content": "hi"}],
            "metadata": {"user_id": '{"device_id":"d","account_uuid":"","session_id":"54c1eb09"}'},
        },
        source=KeySource.BODY,
        session="54c1eb09",
        max_output_tokens=1,
        num_prefix=1,
        has_group=False,
    ),
    "opencode": Shape(
        api=Api.CHAT,
        headers={"x-session-affinity": "ses_1", "X-Session-Id": "ses_1", "x-parent-session-id": "ses_0"},
        body={
            "model": "m",
            "stream": True,
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": LONG}],
        },
        source=KeySource.HEADER,
        session="ses_1",
        num_prefix=2,
    ),
    "roo-code": Shape(
        api=Api.CHAT,
        headers={"HTTP-Referer": "https://example.org", "X-Title": "Roo Code", "X-Roo-Task-ID": "task"},
        body={"model": "m", "stream": True, "messages": [{"role": "user", "content": LONG}]},
        source=KeySource.HEADER,
        session="task",
        num_prefix=1,
        has_group=False,
    ),
    "cline-behind-litellm": Shape(
        api=Api.CHAT,
        headers={"X-Title": "Cline"},
        body={
            "model": "m",
            "stream": True,
            "litellm_session_id": "cline-17",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": LONG}],
        },
        source=KeySource.BODY,
        session="cline-17",
        num_prefix=2,
    ),
    "open-webui": Shape(
        api=Api.CHAT,
        headers={
            "X-OpenWebUI-User-Id": "u",
            "X-OpenWebUI-User-Name": "J%C3%BCrgen",
            "X-OpenWebUI-Chat-Id": "chat",
            "X-OpenWebUI-Message-Id": "m7",
        },
        body={
            "model": "m",
            "stream": True,
            "messages": [
                {"role": "system", "content": "Now: 2026-11-29 10:00:01"},
                {"role": "user", "content": "hi"},
            ],
        },
        source=KeySource.HEADER,
        session="chat",
        num_prefix=2,
    ),
    "librechat-misconfigured": Shape(
        api=Api.CHAT,
        headers={"X-Conversation-Id": "{{LIBRECHAT_CONVERSATION_ID}}"},
        body={
            "model": "m",
            "stream": True,
            "user": "65f",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": LONG}],
        },
        source=KeySource.FINGERPRINT,
        num_prefix=2,
    ),
    "aider": Shape(
        api=Api.CHAT,
        headers={"User-Agent": "litellm/1.7"},
        body={
            "model": "m",
            "stream": True,
            "messages": [
                {
                    "role": "system",
                    "content": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
                },
                {"role": "user", "content": LONG},
                {"role": "assistant", "content": "Ok."},
            ],
        },
        source=KeySource.FINGERPRINT,
        is_follow_up=True,
        num_prefix=3,
    ),
    "sglang-session": Shape(
        api=Api.GENERATE,
        headers={},
        body={"text": "Once upon a time", "stream": True, "session_params": {"session_id": "abc"}},
        source=KeySource.BODY,
        num_prefix=1,
        has_group=False,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_real_clients_request_is_understood(parse: Parse, name: str) -> None:
    """Key source, session, follow-up, limits and prefix of a request as this client sends it."""
    shape = SHAPES[name]
    facts = parse(shape.body, shape.headers, api=shape.api)
    assert facts.key_source is shape.source
    assert facts.is_stream
    assert (facts.session_key is not None) == (shape.source is not KeySource.PROMPT_GROUP)
    if shape.session is not None:
        plain = {"model": "m", "messages": []}
        assert facts.session_key == parse(plain, {"x-session-id": shape.session}).session_key
    assert facts.is_follow_up is shape.is_follow_up
    assert facts.max_output_tokens == shape.max_output_tokens
    assert len(facts.prefix) == shape.num_prefix
    assert (facts.prompt_key is not None) is shape.has_group
    assert facts.num_prompt_bytes > 0


@pytest.mark.parametrize("name", SHAPES)
def test_spaces_and_escapes_of_a_json_writer_do_not_change_the_key(parse: Parse, name: str) -> None:
    """Python and JavaScript write JSON differently; session and prompt group are the same."""
    shape = SHAPES[name]
    compact, spaced = (
        parse(
            json.dumps(shape.body, separators=separators, ensure_ascii=escape).encode(),
            shape.headers,
            api=shape.api,
        )
        for separators, escape in (((",", ":"), False), ((", ", ": "), True))
    )
    assert compact.session_key == spaced.session_key
    assert compact.is_follow_up == spaced.is_follow_up
    if "tools" not in shape.body:
        assert compact.prompt_key == spaced.prompt_key


def test_counting_tokens_follows_the_session_but_binds_nothing(parse: Parse) -> None:
    """`count_tokens` leaves nothing in a cache, so it never decides where a conversation lives."""
    shape = SHAPES["claude-code"]
    turn = parse(shape.body, shape.headers, api=shape.api, path="/v1/messages")
    count = parse(shape.body, shape.headers, api=shape.api, path="/v1/messages/count_tokens")
    assert turn.session_key == count.session_key
    assert (turn.sets_binding, count.sets_binding) == (True, False)
