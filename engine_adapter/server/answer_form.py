"""The form that an answer must have: free text, a grammar, or tool calls.

Decides how `response_format`, the `guided_*` fields and `tool_choice` combine. A required tool call is a
grammar: the answer is one JSON object whose `name` and `arguments` match one of the tools, whatever format
the checkpoint was trained on. Schemas are compiled off the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine_adapter.engine.text.grammar import Grammar, GrammarCompiler, GrammarInvalid, GrammarUnavailable
from engine_adapter.engine.text.tool_calls import ToolCallFormat, format_of_template
from engine_adapter.server.errors import ApiError, bad_request, unsupported
from engine_adapter.server.protocol import ChatRequest, SamplingFields

MAX_TOOLS = 128  # OpenAI's limit


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """`tool_format` is None if the text is not searched for tool calls."""

    grammar: Grammar | None = None
    tool_format: ToolCallFormat | None = None


async def answer_form(body: SamplingFields, grammars: GrammarCompiler) -> AnswerForm:
    """The form that the fields shared by chat and text completions request.

    Raises:
        ApiError: 400 naming the field that is unknown, unusable or contradicts another.
    """
    wishes = {
        "response_format": _response_format(body.response_format, grammars),
        "guided_json": _guided(body.guided_json, grammars.json_schema),
        "guided_regex": _guided(body.guided_regex, grammars.regex),
        "guided_choice": _guided(body.guided_choice or None, grammars.choice),
    }
    asked = {param: build for param, build in wishes.items() if build is not None}
    if len(asked) > 1:
        raise bad_request(f"give only one of {', '.join(asked)}", param=list(asked)[1])
    for param, build in asked.items():
        return AnswerForm(grammar=await _compile(param, build))
    return AnswerForm()


async def chat_answer_form(body: ChatRequest, grammars: GrammarCompiler, template: str) -> AnswerForm:
    """The form of a chat answer, tools included."""
    names = check_tools(body)
    choice = body.tool_choice if names else None
    form = await answer_form(body, grammars)
    forced = _forced_names(choice, names)
    if forced and form.grammar is not None:
        raise bad_request("tool_choice and response_format contradict each other", param="tool_choice")
    if forced:
        schema = {"anyOf": [_call_schema(tool) for tool in body.tools or () if _name_of(tool) in forced]}
        grammar = await _compile("tools", lambda: grammars.json_schema(schema))
        return AnswerForm(grammar=grammar, tool_format=ToolCallFormat.FORCED)
    if not names or choice == "none" or form.grammar is not None:
        return form
    return AnswerForm(tool_format=format_of_template(template))


def check_tools(body: ChatRequest) -> list[str]:
    """Return the names of the tools; raise a 400 that names the first invalid one."""
    tools = body.tools or []
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools: at most {MAX_TOOLS}, got {len(tools)}", param="tools")
    for index, tool in enumerate(tools):
        if tool.get("type") != "function" or not _name_of(tool):
            where = f"tools[{index}]"
            raise bad_request(f"{where} must be a function with a name", param=where, code="invalid_value")
    return [_name_of(tool) for tool in tools]


def _forced_names(choice: object, names: list[str]) -> list[str]:
    """The tools of which one must be called; [] if the model may decide."""
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        return names
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name not in names:
        raise bad_request("tool_choice must be none, auto, required or one of the tools", param="tool_choice")
    return [str(name)]


def _call_schema(tool: Mapping[str, object]) -> dict[str, object]:
    function = tool["function"]
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    return {
        "type": "object",
        "properties": {
            "name": {"const": _name_of(tool)},
            "arguments": parameters if isinstance(parameters, Mapping) else {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _name_of(tool: Mapping[str, object]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _response_format(
    wanted: Mapping[str, object] | None, grammars: GrammarCompiler
) -> Callable[[], Grammar] | None:
    kind = (wanted or {}).get("type", "text")
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return grammars.json_object
    if kind == "json_schema":
        holder = wanted.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, Mapping) else None
        if not isinstance(schema, Mapping):
            raise bad_request(
                "response_format.json_schema.schema is required", param="response_format.json_schema.schema"
            )
        return lambda: grammars.json_schema(schema)
    if kind == "regex":
        pattern = wanted.get("pattern")
        if not isinstance(pattern, str):
            raise bad_request("response_format.pattern must be a string", param="response_format.pattern")
        return lambda: grammars.regex(pattern)
    raise unsupported("response_format.type", f"the format {str(kind)[:50]!r}")


def _guided(value: object, build: Callable[..., Grammar]) -> Callable[[], Grammar] | None:
    if value is None:
        return None
    return lambda: build(value)


async def _compile(param: str, build: Callable[[], Grammar]) -> Grammar:
    try:
        return await asyncio.to_thread(build)
    except GrammarInvalid as error:
        raise bad_request(f"{param} cannot be used: {error}", param=param, code="invalid_schema") from error
    except GrammarUnavailable as error:
        raise ApiError(400, str(error), code="unsupported_parameter", param=param) from error
