"""The clients that are tested: `docs/clients.md` names the source of each row."""

from __future__ import annotations

from typing import Final

from fakes.client_shapes import (
    COUNT,
    COUNT_INPUT,
    MESSAGES,
    RESPONSES,
    Client,
    Helper,
)

_CLAUDE_SYSTEM: Final = (
    "x-anthropic-billing-header: cc_version=2.1.300.1; cc_entrypoint=cli; cch={request};",
    "You are a coding agent in a terminal.",
    "Work step by step and show what you changed. " * 20,
)
_ONE_TOOL: Final = {"name": "grep", "description": "Searches.", "input_schema": {"type": "object"}}
_CLAUDE_HELPERS: Final = (
    Helper(name="quota", ask="quota", fields={"max_tokens": 1}),
    Helper(name="count", ask="foo", path=COUNT, fields={"tools": [_ONE_TOOL]}),
    Helper(name="count without count_tokens", ask="count", fields={"max_tokens": 1, "tools": [_ONE_TOOL]}),
    Helper(name="old title", ask="Please write a 5-10 word title for the following conversation: …"),
    Helper(
        name="title",
        ask="<session>Why does the parser reject it?</session>",
        system=(*_CLAUDE_SYSTEM[:2], "Generate a concise, sentence-case title (3-7 words) that says it."),
    ),
    Helper(
        name="topic",
        ask="Why does the parser reject it?",
        system=("Analyze if this message indicates a new conversation topic and name it.",),
    ),
    Helper(
        name="command prefix",
        ask="<policy_spec> … Command: git push",
        system=("Your task is to process Bash commands that an AI coding agent wants to run.",),
    ),
)
_CLAUDE_AGENT: Final = {"X-Claude-Code-Agent-Id": "{agent}", "X-Claude-Code-Parent-Agent-Id": "main"}
_CLAUDE_HEADERS: Final = {"x-api-key": "k", "anthropic-version": "2023-06-01", "x-app": "cli"}
_TITLE_AGENT: Final = Helper(
    name="title",
    ask=("Generate a title for this conversation:\n", "Why does the parser reject it?"),
    system=("You are a title generator. You output ONLY a thread title.",),
)
_OPENCODE_AGENT: Final = {
    "x-session-affinity": "{agent}",
    "X-Session-Id": "{agent}",
    "x-parent-session-id": "{session}",
}
_CODEX_META: Final = '{"turn_id":"{request}","session_id":"{session}"}'

CLIENTS: Final = {
    "claude-code": Client(
        source="header",
        path=MESSAGES,
        headers=_CLAUDE_HEADERS | {"X-Claude-Code-Session-Id": "{session}"},
        fields={"metadata": {"user_id": '{"device_id":"{person}","account_uuid":"","session_id":"other"}'}},
        agent=_CLAUDE_AGENT,
        helpers=_CLAUDE_HELPERS,
        system=_CLAUDE_SYSTEM,
    ),
    "claude-code with hints": Client(
        source="header",
        path=MESSAGES,
        headers={
            **_CLAUDE_HEADERS,
            "X-Claude-Code-Session-Id": "{session}",
            "x-claude-code-request-class": "main",
            "x-claude-code-prompt-id": "{request}",
        },
        agent=_CLAUDE_AGENT | {"x-claude-code-request-class": "subagent"},
        helpers=(
            Helper(
                name="title",
                ask="Why does the parser reject it?",
                system=("Any words.",),
                headers={"x-claude-code-request-class": "auxiliary"},
            ),
        ),
        system=_CLAUDE_SYSTEM,
    ),
    "claude-code without header": Client(
        source="body",
        path=MESSAGES,
        headers=_CLAUDE_HEADERS,
        fields={"metadata": {"user_id": '{"device_id":"{person}","session_id":"{session}"}'}},
        agent=_CLAUDE_AGENT,
        helpers=_CLAUDE_HELPERS[:4],
    ),
    "claude-code 1": Client(
        source="body",
        path=MESSAGES,
        headers=_CLAUDE_HEADERS,
        fields={"metadata": {"user_id": "user_{person}_account_a_session_{session}"}},
        helpers=_CLAUDE_HELPERS[:4],
    ),
    "codex": Client(
        source="header",
        path=RESPONSES,
        headers={
            "originator": "codex_cli_rs",
            "session-id": "{session}",
            "thread-id": "{session}",
            "x-client-request-id": "{request}",
            "x-codex-turn-metadata": _CODEX_META,
        },
        fields={"prompt_cache_key": "{session}", "store": False},
        agent={"thread-id": "{agent}", "x-openai-subagent": "collab_spawn"},
        helpers=(Helper(name="count", ask="foo", path=COUNT_INPUT),),
    ),
    "codex 2025": Client(
        source="header",
        path=RESPONSES,
        headers={"originator": "codex_cli_rs", "session_id": "{session}"},
        fields={"prompt_cache_key": "{session}", "store": False},
        agent={"session_id": "{agent}"},
        agent_fields={"prompt_cache_key": "{agent}"},
    ),
    "opencode": Client(
        source="header",
        headers={"x-session-affinity": "{session}", "X-Session-Id": "{session}"},
        agent=_OPENCODE_AGENT,
        helpers=(_TITLE_AGENT,),
    ),
    "opencode service": Client(
        source="header",
        headers={
            "x-opencode-session": "{session}",
            "x-opencode-request": "{request}",
            "x-opencode-project": "{person}",
        },
        agent={"x-opencode-session": "{agent}"},
    ),
    "kilo": Client(
        source="header",
        headers={
            "x-kilo-session": "{session}",
            "x-kilo-request": "{request}",
            "X-KILOCODE-TASKID": "{session}",
            "X-KILOCODE-MACHINEID": "{person}",
        },
        agent={
            "x-kilo-session": "{agent}",
            "X-KILOCODE-TASKID": "{agent}",
            "X-KILOCODE-PARENT-TASKID": "{session}",
        },
        helpers=(
            Helper(
                name="title",
                ask=_TITLE_AGENT.ask,
                system=(f"You are friendly and direct.\n{_TITLE_AGENT.system[0]}",),
            ),
        ),
    ),
    "goose": Client(
        source="header",
        headers={"agent-session-id": "{session}"},
        agent={"agent-session-id": "{agent}"},
        helpers=(
            Helper(
                name="title",
                ask="Why does the parser reject it?",
                system=("Generate a short title (four words or less) for this conversation.",),
            ),
        ),
        opening="hi",
    ),
    "crush": Client(
        source="header",
        headers={"x-session-id": "{session}", "x-session-affinity": "{session}"},
        agent={"x-session-id": "{agent}", "x-session-affinity": "{agent}"},
        helpers=(
            Helper(
                name="title",
                ask="Generate a concise title for the following content:\n\nWhy?",
                system=("You will generate a short title based on the first message of a user.",),
            ),
        ),
    ),
    "cline": Client(
        source="header", headers={"X-Task-ID": "{session}", "X-CLIENT-TYPE": "cline-cli"}, has_tools=False
    ),
    "cline, openai-compatible": Client(source="header", headers={"x-litellm-trace-id": "{session}"}),
    "cline behind litellm": Client(source="body", fields={"litellm_session_id": "cline-{session}"}),
    "roo": Client(source="header", headers={"X-Roo-Task-ID": "{session}", "X-Title": "Roo Code"}),
    "roo, openai": Client(
        source="header", path=RESPONSES, headers={"session_id": "{session}", "originator": "roo-code"}
    ),
    "open-webui": Client(
        source="header",
        headers={
            "X-OpenWebUI-User-Id": "{person}",
            "X-OpenWebUI-Chat-Id": "{session}",
            "X-OpenWebUI-Message-Id": "{request}",
        },
        helpers=(
            Helper(name="title", ask="### Task:\nGive it a title."),
            Helper(name="tags", ask="Tags?", headers={"X-OpenWebUI-Task": "tags_generation"}),
        ),
        opening="Hi",
        has_tools=False,
    ),
    "librechat": Client(
        source="header",
        headers={"X-Conversation-Id": "{session}"},
        fields={"user": "{person}"},
        helpers=(
            Helper(name="title", ask="Provide a concise, 5-word-or-less title for the conversation, …"),
            Helper(
                name="other title", ask="Analyze this conversation and provide:\n1. The detected language"
            ),
        ),
        opening="Hello",
    ),
    "openclaw": Client(
        source="header",
        path=RESPONSES,
        headers={"session_id": "{session}", "x-client-request-id": "{session}"},
        fields={"prompt_cache_key": "{session}"},
        agent={"session_id": "{agent}", "x-client-request-id": "{agent}"},
    ),
    "openclaw gateway": Client(
        source="header",
        headers={"x-openclaw-session-key": "agent:main:chat:{session}", "x-openclaw-agent-id": "main"},
        agent={"x-openclaw-session-key": "agent:main:subagent:{agent}"},
    ),
    "pi": Client(
        source="header",
        headers={"session_id": "{session}", "x-session-affinity": "{session}"},
        fields={"prompt_cache_key": "{session}"},
    ),
    "hermes": Client(source="header", headers={"X-Hermes-Session-Id": "{session}"}, opening="hi"),
    "copilot-cli": Client(
        source="header",
        headers={
            "X-Client-Session-Id": "{session}",
            "X-Interaction-Id": "{request}",
            "X-Agent-Task-Id": "{request}",
        },
    ),
    "coder": Client(
        source="header",
        headers={"X-Coder-Chat-Id": "{session}", "X-Coder-Owner-Id": "{person}"},
        agent={"X-Coder-Subchat-Id": "{agent}"},
    ),
    "amp": Client(source="header", headers={"x-amp-thread-id": "{session}", "x-amp-message-id": "{request}"}),
    "langgraph server": Client(
        source="header",
        headers={"x-thread-id": "{session}"},
        helpers=(
            Helper(name="grader", ask="You are a grader assessing the relevance of a document …"),
            Helper(name="question", ask="Given the following conversation and a follow up question, …"),
            Helper(
                name="router",
                ask="Why does the parser reject it?",
                system=("You are an expert at routing a user question to a search.",),
            ),
        ),
        opening="hey",
    ),
    "chat server": Client(source="header", headers={"x-chat-id": "{session}"}, opening="Hi"),
    "helicone": Client(
        source="header",
        headers={
            "Helicone-Session-Id": "{session}",
            "Helicone-Session-Path": "/plan",
            "Helicone-User-Id": "{person}",
            "Helicone-Request-Id": "{request}",
        },
    ),
    "codex behind a proxy": Client(
        source="header", path=RESPONSES, headers={"x-codex-session-id": "{session}"}
    ),
    "litellm": Client(source="header", headers={"x-litellm-session-id": "{session}"}),
    "cursor": Client(
        source="body",
        fields={"metadata": {"cursorConversationId": "{session}"}, "user": "{person}"},
    ),
    "qwen-code": Client(
        source="body", fields={"metadata": {"sessionId": "{session}", "promptId": "{request}"}}
    ),
    "openhands": Client(
        source="body",
        fields={"metadata": {"session_id": "{session}", "trace_user_id": "{person}", "tags": ["a"]}},
    ),
    "openrouter apps": Client(source="body", fields={"session_id": "{session}", "user": "{person}"}),
    "zed": Client(source="prompt_cache_key", fields={"prompt_cache_key": "{session}"}),
    "kimi-cli": Client(source="prompt_cache_key", fields={"prompt_cache_key": "{session}"}, opening="hi"),
    "openai sdk": Client(
        source="fingerprint",
        headers={"User-Agent": "OpenAI/Python 2.8.0", "x-request-id": "{request}"},
        fields={"user": "{person}", "safety_identifier": "{person}"},
    ),
    "openai sdk, a short opening": Client(
        source="fingerprint",
        headers={"User-Agent": "OpenAI/Python 2.8.0"},
        opening="Hi",
        has_tools=False,
    ),
    "langchain": Client(
        source="fingerprint",
        headers={"User-Agent": "langchainjs-openai/1.0.0", "traceparent": "00-{request}-01"},
        helpers=(Helper(name="grader", ask="You are a grader assessing the relevance of a document …"),),
        agent={},
    ),
    "langchain, a short opening": Client(
        source="fingerprint",
        headers={"User-Agent": "langchainjs-openai/1.0.0"},
        opening="Hi",
    ),
    "aider": Client(source="fingerprint", headers={"User-Agent": "litellm/1.80"}, has_tools=False),
    "vercel ai sdk": Client(source="fingerprint", headers={"User-Agent": "ai-sdk/5.0"}, agent={}),
    "vercel ai sdk, a short opening": Client(
        source="fingerprint", headers={"User-Agent": "ai-sdk/5.0"}, opening="Hi"
    ),
    "continue": Client(
        source="fingerprint",
        headers={"x-continue-unique-id": "{person}"},
        helpers=(Helper(name="title", ask="Given the following... please reply with a title for the chat"),),
    ),
    "vscode, own model": Client(
        source="fingerprint",
        headers={
            "X-Request-Id": "{request}",
            "X-Interaction-Id": "{request}",
            "X-Agent-Task-Id": "{request}",
        },
    ),
}
