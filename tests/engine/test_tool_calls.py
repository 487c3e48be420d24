"""Tool calls in a model's text: every format, every cut, nothing lost."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_adapter.engine.text.tool_calls import ToolCall, ToolCallFormat, ToolCallParser, format_of_template
from engine_adapter.engine.text.tool_prompt import with_tools_in_text

CALL = ToolCall(name="f", arguments='{"a": 1}')
CALL_JSON = '{"name": "f", "arguments": {"a": 1}}'


def read(format_: ToolCallFormat, text: str, cuts: list[int] | None = None) -> tuple[str, list[ToolCall]]:
    """Feed the text in pieces; return all shown text and all calls."""
    parser = ToolCallParser(format_)
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts or [])})
    found: list[str | ToolCall] = []
    for start, end in itertools.pairwise(bounds):
        found += parser.push(text[start:end])
    found += parser.flush()
    shown = "".join(item for item in found if isinstance(item, str))
    return shown, [item for item in found if isinstance(item, ToolCall)]


@pytest.mark.parametrize(
    ("format_", "text", "shown", "calls"),
    [
        (ToolCallFormat.HERMES, f"Sure. <tool_call>\n{CALL_JSON}\n</tool_call>", "Sure. ", [CALL]),
        (
            ToolCallFormat.HERMES,
            f"<tool_call>{CALL_JSON}</tool_call>\n<tool_call>{CALL_JSON}</tool_call>",
            "\n",
            [CALL, CALL],
        ),
        (ToolCallFormat.HERMES, f"<tool_call>{CALL_JSON}", "", [CALL]),
        (
            ToolCallFormat.HERMES,
            "<tool_call>not json</tool_call> end",
            "<tool_call>not json</tool_call> end",
            [],
        ),
        (ToolCallFormat.HERMES, "a < b <tool> c", "a < b <tool> c", []),
        (ToolCallFormat.MISTRAL, f"[TOOL_CALLS] [{CALL_JSON}]", "", [CALL]),
        (ToolCallFormat.MISTRAL, "no calls [TOOL", "no calls [TOOL", []),
        (ToolCallFormat.LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", [CALL]),
        (ToolCallFormat.LLAMA3, f"<|python_tag|>{CALL_JSON}; {CALL_JSON}", "", [CALL, CALL]),
        (ToolCallFormat.LLAMA3, 'the set {"a"}', 'the set {"a"}', []),
        (ToolCallFormat.LLAMA3, '{"answer": 42}', '{"answer": 42}', []),
        (ToolCallFormat.FORCED, CALL_JSON, "", [CALL]),
        (ToolCallFormat.FORCED, '{"name": "f", "argum', '{"name": "f", "argum', []),
        (ToolCallFormat.HERMES, "", "", []),
    ],
)
def test_formats(format_: ToolCallFormat, text: str, shown: str, calls: list[ToolCall]) -> None:
    """Calls are found where the format puts them; broken or unfinished ones stay text."""
    assert read(format_, text) == (shown, calls)


FRAGMENTS = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", CALL_JSON, "text ", "<", "tool", "{", "[TOOL_CALLS]", "\n"]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=300)
@given(st.sampled_from(ToolCallFormat), FRAGMENTS, st.lists(st.integers(0, 200), max_size=12))
def test_any_chunking_reads_alike(format_: ToolCallFormat, text: str, cuts: list[int]) -> None:
    """Streamed and whole answers hold the same text and the same calls."""
    assert read(format_, text, cuts) == read(format_, text)


def test_text_before_a_call_is_not_delayed() -> None:
    """Only what may be the start of a marker waits."""
    parser = ToolCallParser(ToolCallFormat.HERMES)
    assert parser.push("Let me look <tool") == ["Let me look "]
    assert parser.push("s>") == ["<tools>"]


def test_arguments_given_as_text_stay_as_they_are() -> None:
    """Some checkpoints write the arguments as a JSON string."""
    text = json.dumps({"name": "f", "arguments": '{"a": 1}'})
    assert read(ToolCallFormat.FORCED, text) == ("", [CALL])


@pytest.mark.parametrize(
    ("template", "format_"),
    [
        ("… <tool_call> …", ToolCallFormat.HERMES),
        ("… [TOOL_CALLS] …", ToolCallFormat.MISTRAL),
        ("… Environment: ipython …", ToolCallFormat.LLAMA3),
        ("{{ messages }}", ToolCallFormat.HERMES),
    ],
)
def test_the_template_tells_the_format(template: str, format_: ToolCallFormat) -> None:
    """A checkpoint is read in the format that its template shows to it."""
    assert format_of_template(template) is format_


def test_a_template_without_tools_is_told_in_plain_messages() -> None:
    """Definitions join the system message, calls and results become text, order is kept."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    system, assistant, result = with_tools_in_text(messages, [tool])
    assert str(system["content"]).startswith("Be brief.")
    assert '"name": "f"' in str(system["content"])
    assert assistant["content"] == f"<tool_call>\n{CALL_JSON}\n</tool_call>"
    assert result == {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}
    assert with_tools_in_text(messages[:1], []) == messages[:1]


def test_a_system_message_is_made_where_there_is_none() -> None:
    """The definitions need a place."""
    (system, user) = with_tools_in_text([{"role": "user", "content": "hi"}], [{"function": {"name": "f"}}])
    assert system["role"] == "system"
    assert user == {"role": "user", "content": "hi"}
