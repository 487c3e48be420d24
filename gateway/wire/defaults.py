"""What we know about clients: headers and fields with session ids, junk ids, volatile text.

Data only: the defaults of `settings`. To support a new client, add a line here and a test.
"""

from __future__ import annotations

from typing import Final

SESSION_HEADERS: Final = (
    "x-session-id",  # Homing, OpenCode, OpenRouter, vLLM router and benchmarks, llm-d
    "x-homing-session-id",
    # Codex: a sub-agent has its own thread, with its own prompt, in the session of its parent. The thread is
    # the conversation, so it comes before the session.
    "thread-id",
    "session-id",
    "session_id",  # older Codex, Roo Code, Cline; nginx drops names with underscores by default
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-roo-task-id",
    "x-task-id",  # Cline
    "x-openwebui-chat-id",
    "x-conversation-id",  # LibreChat's documented recipe
    "x-litellm-session-id",
    "x-smg-routing-key",
    "x-sgl-routing-key",
    "x-olla-session-id",
    "x-dynamo-session-id",
    "x-session-token",  # llm-d, echoed by its clients
    "x-aibrix-session-key",
    "x-grok-conv-id",
    "x-affinity",  # Mistral
    "x-amp-thread-id",
    "x-multi-turn-session-id",
    "x-cache-affinity-key",
    "routing-key",  # KubeAI
    "x-session-affinity",  # last: some clients send one per process, and OpenCode also sends x-session-id
)

NEVER_A_SESSION: Final = frozenset(
    {
        "api-key",
        "authorization",
        "cookie",
        "forwarded",
        "idempotency-key",
        "traceparent",
        "tracestate",
        "x-api-key",
        "x-client-request-id",
        "x-forwarded-for",
        "x-real-ip",
        "x-request-id",
        "x-trace-id",
    }
)
"""Headers that name a request, a person or an address. Keying on one would scatter the turns of a session or
put all sessions of a tenant on one backend."""

SESSION_BODY_FIELDS: Final = (
    "session_id",
    "metadata.session_id",
    "metadata.user_id",  # only the session part, see `keys.session_part`
    "conversation",  # a string, or an object with an id
    "conversation.id",
    "session_params.session_id",  # SGLang
    "litellm_session_id",
)

FIELDS_WITH_ANOTHER_MEANING: Final = frozenset(
    {
        "model", "messages", "input", "prompt", "text", "system", "instructions", "tools", "stream",
        "max_tokens", "max_completion_tokens", "max_output_tokens",
    }
)  # fmt: skip
"""Top-level JSON fields that have their own meaning and cannot name a session."""

IGNORED_VALUES: Final = (
    "undefined",
    "null",
    "none",
    "nil",
    "nan",
    "true",
    "false",
    "new",
    "default",
    "unknown",
    "anonymous",
    "0",
    "-",
    "[object object]",
    "00000000-0000-0000-0000-000000000000",
    "00000000000000000000000000000000",
)

# `{{CHAT_ID}}`, `${CHAT_ID}`, `<chat-id>`, `%CHAT_ID%`, `$CHAT_ID`: unfilled templates.
IGNORED_PATTERN: Final = r"\{\{.*\}\}|\$\{.*\}|<[^<>]*>|%[A-Za-z_]+%|\$[A-Za-z_]+|\{[A-Za-z_.]+\}"

# (name, regular expression, what is hashed in its place), applied in this order, to system prompts only.
# Dates and clock times are not here, because `dates` finds them faster than regular expressions could.
VOLATILE_TEXT: Final = (
    # Claude Code's first system text; `cch=` differs on every request.
    ("claude_code_billing", r"\Ax-anthropic-billing-header:[^\n]*\n?", ""),
    ("weekday", r"oday is (?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b", "oday is <weekday>"),
)
