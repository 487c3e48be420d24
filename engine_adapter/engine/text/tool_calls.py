"""Parses tool calls from a model's text while it streams.

Decides which formats are known, and which one a checkpoint writes, judging by its template: Hermes and Qwen
(`<tool_call>{…}</tool_call>`), Mistral (`[TOOL_CALLS] [{…}]`), Llama 3 (the answer is a JSON object), and
`forced`, where a grammar made the whole answer one call. Invariants: text before a call is passed on at once,
except what may be the start of a marker; what looks like a call but is not is passed on as text, so nothing
that the model wrote is lost. A call is reported when it is complete.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass

from engine_adapter.engine.text.detokenizer import num_held_back


class ToolCallFormat(enum.Enum):
    HERMES = "hermes"
    MISTRAL = "mistral"
    LLAMA3 = "llama3"
    FORCED = "forced"

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the marker is a special token, so that the text must be decoded with special tokens."""
        return self in (ToolCallFormat.MISTRAL, ToolCallFormat.LLAMA3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One complete call; `arguments` is JSON text, as OpenAI reports it."""

    name: str
    arguments: str


START_MARKERS = {
    ToolCallFormat.HERMES: "<tool_call>",
    ToolCallFormat.MISTRAL: "[TOOL_CALLS]",
    ToolCallFormat.LLAMA3: "<|python_tag|>",
}
HERMES_END = "</tool_call>"


def format_of_template(source: str) -> ToolCallFormat:
    """The format that a checkpoint with this chat template was trained to write."""
    if "[TOOL_CALLS]" in source:
        return ToolCallFormat.MISTRAL
    if "<tool_call>" not in source and ("<|python_tag|>" in source or "ipython" in source):
        return ToolCallFormat.LLAMA3
    return ToolCallFormat.HERMES  # also for templates without tools: `tool_prompt` writes the instructions


class ToolCallParser:
    """Reads the text of one choice."""

    def __init__(self, format_: ToolCallFormat) -> None:
        self._format = format_
        self._marker = START_MARKERS.get(format_, "")
        self._held = ""  # text that may still be either
        self._is_inside = format_ is ToolCallFormat.FORCED
        self._is_at_start = True  # nothing but white space so far

    def push(self, text: str) -> list[str | ToolCall]:
        """Take new text; return the text and the calls that are now certain, in order."""
        self._held += text
        results: list[str | ToolCall] = []
        while self._enter(results) and self._leave(results):
            pass
        return results

    def flush(self) -> list[str | ToolCall]:
        """The text is complete: what is still held is a call or text."""
        held, self._held = self._held, ""
        if not self._is_inside:
            return [held] if held else []
        calls = _parse_calls(held)
        shown = held if self._format is ToolCallFormat.FORCED else self._marker + held
        return list(calls) or ([shown] if shown.strip() else [])

    def _enter(self, results: list[str | ToolCall]) -> bool:
        """Release text up to the next marker; return whether what is held is inside a call."""
        if self._is_inside:
            return True
        if self._format is ToolCallFormat.LLAMA3 and self._is_at_start and self._held.lstrip()[:1] == "{":
            self._is_inside, self._marker = True, ""  # the answer itself is the call, without a marker
            return True
        before, found, after = self._held.partition(self._marker)
        if found:
            self._held, self._is_inside = after, True
        else:
            keep = num_held_back(self._held, [self._marker])
            before, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if before:
            self._is_at_start = self._is_at_start and not before.strip()
            results.append(before)
        return self._is_inside

    def _leave(self, results: list[str | ToolCall]) -> bool:
        """Parse the call at its end marker; only Hermes has one, the others run to the end of the text."""
        if self._format is not ToolCallFormat.HERMES or HERMES_END not in self._held:
            return False
        body, _, self._held = self._held.partition(HERMES_END)
        self._is_inside = False
        results.extend(_parse_calls(body) or [self._marker + body + HERMES_END])
        return True


def _parse_calls(body: str) -> list[ToolCall]:
    """Parse one JSON object, a list of them, or several separated by semicolons; [] for anything else."""
    try:
        values = json.loads(body)
    except ValueError:
        try:
            values = [json.loads(part) for part in body.split(";") if part.strip()]
        except ValueError:
            return []
    calls = [_call_of(value) for value in (values if isinstance(values, list) else [values])]
    complete = [call for call in calls if call is not None]
    return complete if len(complete) == len(calls) else []


def _call_of(value: object) -> ToolCall | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name=value["name"], arguments=text)
