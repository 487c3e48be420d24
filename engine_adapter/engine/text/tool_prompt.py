"""Describes tools in plain messages, for checkpoints whose template does not support them.

Decides the wording. It follows the Hermes convention, which small instruct models have seen most often and
which `tool_calls` can read. A template that supports tools gets them unchanged instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

Message = Mapping[str, object]

INSTRUCTIONS = (
    "You may call these functions to answer. To call one, write its name and arguments as JSON between "
    "<tool_call> and </tool_call>, like this:\n"
    '<tool_call>\n{"name": "function_name", "arguments": {"argument": "value"}}\n</tool_call>\n'
    "The functions, one a line:\n"
)


def with_tools_in_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Return messages without tool fields: definitions in the system message, calls and results as text."""
    told = [_in_text(message) for message in messages]
    if not tools:
        return told
    definitions = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = INSTRUCTIONS + definitions
    if told and told[0].get("role") in ("system", "developer"):
        first = told[0]
        return [{**first, "content": f"{_text(first.get('content'))}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _in_text(message: Message) -> dict[str, object]:
    told = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
    if message.get("role") == "tool":
        content = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        told["content"] = "\n".join(filter(None, [_text(message.get("content")), *map(_call_text, calls)]))
    return told


def _call_text(call: object) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return ""
    arguments = function.get("arguments")
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {shown}}}\n</tool_call>'


def _text(content: object) -> str:
    """Return content as text. Parts that are not text are left out."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
