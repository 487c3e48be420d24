"""What is known of clients: the headers and fields that carry their sessions, junk ids, volatile text.

Data only, the defaults of `settings`. A new client that needs an entry here gets one line and a test.
"""

from __future__ import annotations

from typing import Final

SESSION_HEADERS: Final = (
    "x-session-id",  # Homing, OpenCode, OpenRouter, vLLM router and benchmarks, llm-d
    "x-homing-session-id",
    # Codex: a sub-agent has its own thread in the session of its parent. Its prompt is its own, so the
    # thread is the conversation and must win.
    "thread-id",
    "session-id",
    "session_id",  # older Codex, Roo Code, Cline; nginx drops names with underscores unless told not to
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
"""Headers that name a request, a person or a place. Keying on one scatters turns or piles up a tenant."""

SESSION_BODY_FIELDS: Final = (
    "session_id",
    "metadata.session_id",
    "metadata.user_id",  # only the session part inside, see `keys.session_part`
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
"""Top-level JSON fields that are read for what they are and can name no session."""

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

# `{{CHAT_ID}}`, `${CHAT_ID}`, `<chat-id>`, `%CHAT_ID%`, `$CHAT_ID`: templates that nobody filled in.
IGNORED_PATTERN: Final = r"\{\{.*\}\}|\$\{.*\}|<[^<>]*>|%[A-Za-z_]+%|\$[A-Za-z_]+|\{[A-Za-z_.]+\}"

# (name, regular expression, what is hashed in its place), applied in this order to system prompts only.
# Dates and clocks are not here: `dates` finds them faster than expressions could.
VOLATILE_TEXT: Final = (
    # Claude Code's first system text; `cch=` differs on every request.
    ("claude_code_billing", r"\Ax-anthropic-billing-header:[^\n]*\n?", ""),
    ("weekday", r"oday is (?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b", "oday is <weekday>"),
)
