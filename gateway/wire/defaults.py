"""What we know about clients: headers and fields with session ids, junk ids, volatile text.

Data only: the defaults of `settings`. To support a new client, add a line here and a test.
"""

from __future__ import annotations

from typing import Final

# Best first. The order matters where a client sends several: what names the narrower thing comes first (a
# thread before the session it belongs to), and what some clients send per process or per request comes last.
SESSION_HEADERS: Final = (
    "x-session-id",  # Homing, opencode, Kilo Code, Crush, OpenRouter, vLLM router and benchmarks, llm-d
    "x-homing-session-id",
    # Codex: a sub-agent has its own thread, with its own prompt, in the session of its parent.
    "thread-id",
    "x-amp-thread-id",
    "x-thread-id",  # chat servers on LangGraph
    "session-id",  # Codex
    "session_id",  # older Codex, Roo Code, Cline, pi, OpenClaw; nginx drops names with underscores by default
    "x-claude-code-session-id",
    "agent-session-id",  # goose
    "x-opencode-session",  # opencode, and goose, Cline, Crush, Cherry Studio towards opencode's own service
    "x-kilo-session",
    "x-kilocode-taskid",
    "x-roo-task-id",
    "x-task-id",  # Cline
    "x-openclaw-session-key",
    "x-hermes-session-id",
    "x-coder-chat-id",
    "x-codex-session-id",  # proxies in front of Codex
    "x-openwebui-chat-id",
    "x-chat-id",
    "x-conversation-id",  # LibreChat's documented recipe
    "helicone-session-id",
    "x-litellm-session-id",
    "x-smg-routing-key",
    "x-sgl-routing-key",
    "x-olla-session-id",
    "x-dynamo-session-id",
    "x-session-token",  # llm-d, echoed by its clients
    "x-aibrix-session-key",
    "x-grok-conv-id",
    "x-affinity",  # Mistral
    "x-multi-turn-session-id",
    "x-cache-affinity-key",
    "routing-key",  # KubeAI
    "x-client-session-id",  # GitHub Copilot CLI: one per process
    "x-session-affinity",  # nanobot: one per process; opencode, Kilo and Crush send x-session-id beside it
    "x-litellm-trace-id",  # Cline's session with the provider "OpenAI compatible"; others: a trace
)

HEADER_QUALIFIERS: Final = ("x-claude-code-agent-id", "x-coder-subchat-id")

AUXILIARY_HEADERS: Final = (
    "x-openwebui-task",
    "x-homing-auxiliary",
    "x-claude-code-request-class=auxiliary",  # `main`, `subagent`, `workflow` and `compaction` are turns
)

NEVER_A_SESSION: Final = frozenset(
    {
        # a request
        "helicone-request-id", "idempotency-key", "traceparent", "tracestate", "x-claude-code-prompt-id",
        "x-client-request-id", "x-codex-turn-metadata", "x-codex-turn-state",
        "x-kilo-request", "x-opencode-request", "x-openwebui-message-id", "x-openwebui-user-message-id",
        "x-request-id", "x-stainless-retry-count", "x-trace-id",
        # one question with all the tool calls that it leads to: GitHub Copilot
        "x-agent-task-id", "x-interaction-id",
        # a person, a machine, an organisation, a project, a kind of agent
        "anthropic-organization-id", "api-key", "authorization", "chatgpt-account-id", "cookie",
        "helicone-user-id", "openai-organization", "openai-project", "x-api-key", "x-claude-code-agent-type",
        "x-codex-installation-id", "x-continue-unique-id", "x-kilo-project", "x-kilocode-machineid",
        "x-kilocode-organizationid", "x-kilocode-projectid", "x-openai-subagent", "x-opencode-project",
        "x-openwebui-user-email", "x-openwebui-user-id", "x-openwebui-user-jwt", "x-openwebui-user-name",
        "x-openwebui-user-role",
        # an address
        "forwarded", "x-forwarded-for", "x-real-ip",
    }
)  # fmt: skip
"""Headers that name a request, a person or an address. Keying on one would scatter the turns of a session or
put all sessions of a tenant on one backend."""

SESSION_BODY_FIELDS: Final = (
    "session_id",  # OpenRouter
    "metadata.session_id",  # LiteLLM, OpenHands
    "metadata.sessionId",  # Qwen Code
    "metadata.cursorConversationId",  # Cursor
    "metadata.user_id",  # only the session part, see `keys.session_part`
    "conversation",  # a string, or an object with an id
    "conversation.id",
    "conversation_id",
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

# How helper requests begin: titles, tags, summaries, classifiers, the prefix of a command. Facts of their
# clients; only as much as tells them from other prompts.
AUXILIARY_PROMPTS: Final = (
    "### Task:\n",  # Open WebUI
    "Please write a 5-10 word title for the following conversation",  # Claude Code up to 2.0
    "Analyze this conversation and provide:\n1. The detected language",  # LibreChat
    "Provide a concise, 5-word-or-less title for the conversation",  # LibreChat
    "Please generate a concise, 5-word-or-less title",  # LibreChat, assistants
    "Given the following... please reply with a title for the chat",  # Continue
    "Generate a concise title for the following content:",  # Crush
    "You are a grader assessing",  # graph agents after LangGraph's examples
    "You are an expert at routing a user question",
    "Given the following conversation and a follow up question",  # LangChain: one question out of many turns
)

# How a line of a system prompt begins that only helper requests have.
AUXILIARY_SYSTEM_PROMPTS: Final = (
    "You are a title generator. You output ONLY a thread title.",  # opencode, Kilo Code
    "You will generate a short title based on the first message",  # Crush
    "Generate a short title (four words or less)",  # goose
    "You are a professional conversation summarizer.",  # LobeChat
    # Claude Code, in the last of its system texts
    "Generate a concise, sentence-case title (3-7 words)",
    "Analyze if this message indicates a new conversation topic",
    "Summarize this coding conversation in under 50 characters",
    "Your task is to process Bash commands that an AI coding agent wants to run",
    "You are a grader assessing",  # graph agents after LangGraph's examples
    "You are an expert at routing a user question",
)
