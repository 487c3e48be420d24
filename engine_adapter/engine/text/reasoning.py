"""Separates a model's reasoning from its answer while the text streams.

Decides where reasoning begins and ends: `<think>…</think>`, the format of Qwen3, DeepSeek-R1 and related
models. It stands at the start of an answer or nowhere. Some templates write the opening marker themselves;
then the answer starts inside. Invariant: reasoning and answer together are all that the model wrote, except
the markers and the white space around them, however the text was cut into pieces. It does not know requests
or dialects.
"""

from __future__ import annotations

import enum

from engine_adapter.engine.text.detokenizer import num_held_back

REASONING_START = "<think>"
REASONING_END = "</think>"


class ReasoningPlace(enum.Enum):
    """Where an answer has its reasoning."""

    NOWHERE = "nowhere"  # the text is not searched
    MARKED = "marked"  # between both markers, if the answer starts with the first
    OPENED = "opened"  # up to the end marker: the prompt ended with the first


def reasoning_place(template_source: str, prompt_tail: str) -> ReasoningPlace:
    """Judge by the checkpoint's template and by the end of the rendered prompt."""
    if REASONING_END not in template_source:
        return ReasoningPlace.NOWHERE
    ends_with_marker = prompt_tail.rstrip().endswith(REASONING_START)
    return ReasoningPlace.OPENED if ends_with_marker else ReasoningPlace.MARKED


class _State(enum.Enum):
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    BEHIND = enum.auto()  # the white space between reasoning and answer
    TEXT = enum.auto()


START_STATES = {
    ReasoningPlace.NOWHERE: _State.TEXT,
    ReasoningPlace.MARKED: _State.BEFORE,
    ReasoningPlace.OPENED: _State.INSIDE,
}


class ReasoningParser:
    """Reads the text of one choice."""

    def __init__(self, place: ReasoningPlace) -> None:
        self._state = START_STATES[place]
        self._has_reasoning = False
        self._held = ""  # text that may still turn out to be either

    def push(self, text: str) -> tuple[str, str]:
        """Take new text; return the reasoning and the answer text that are now certain."""
        self._held += text
        if self._state is _State.BEFORE:
            self._enter()
        reasoning = self._take_reasoning() if self._state is _State.INSIDE else ""
        if self._state is _State.BEHIND:
            self._held = self._held.lstrip()
            self._state = _State.TEXT if self._held else _State.BEHIND
        answer = ""
        if self._state is _State.TEXT:
            answer, self._held = self._held, ""
        return reasoning, answer

    def flush(self) -> tuple[str, str]:
        """The text is complete: what is still held is reasoning without an end marker, or answer text."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._state is _State.INSIDE else ("", held)

    def _enter(self) -> None:
        """Decide whether the answer starts with reasoning, as soon as that is certain."""
        start = self._held.lstrip()
        if start.startswith(REASONING_START):
            self._held, self._state = start.removeprefix(REASONING_START), _State.INSIDE
        elif not REASONING_START.startswith(start):
            self._state = _State.TEXT

    def _take_reasoning(self) -> str:
        """Return the certain part; hold back trailing white space and what may begin the end marker."""
        reasoning, end, rest = self._held.partition(REASONING_END)
        if end:
            self._held, self._state = rest, _State.BEHIND
            certain = reasoning.rstrip()
        else:
            keep = num_held_back(reasoning, [REASONING_END])
            certain = reasoning[: len(reasoning) - keep].rstrip()
            self._held = reasoning[len(certain) :]
        if not self._has_reasoning:
            certain = certain.lstrip()
            self._has_reasoning = bool(certain)
        return certain
