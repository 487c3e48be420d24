"""A model's thoughts are taken out of its text, while the text streams.

Decides where thoughts begin and end: `<think>…</think>`, the format of Qwen3, DeepSeek-R1 and their kin.
They stand at the start of an answer or nowhere; some templates write the opening marker themselves, then the
answer starts inside. Invariant: thoughts and text, markers and the white space around them aside, are all
that the model wrote, however it was cut into pieces. It does not know requests nor dialects.
"""

from __future__ import annotations

import enum

from engine_adapter.engine.text.detokenizer import num_held_back

THOUGHT_START = "<think>"
THOUGHT_END = "</think>"


class ThoughtPlace(enum.Enum):
    """Where an answer has its thoughts."""

    NOWHERE = "nowhere"  # the text is not searched
    MARKED = "marked"  # between both markers, if the answer starts with the first
    OPENED = "opened"  # up to the end marker: the prompt ended with the first


def thought_place(template_source: str, prompt_tail: str) -> ThoughtPlace:
    """Judge by a checkpoint's template and by the last words of what it made."""
    if THOUGHT_END not in template_source:
        return ThoughtPlace.NOWHERE
    return ThoughtPlace.OPENED if prompt_tail.rstrip().endswith(THOUGHT_START) else ThoughtPlace.MARKED


class _State(enum.Enum):
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    BEHIND = enum.auto()  # the white space between thoughts and text
    TEXT = enum.auto()


START_STATES = {
    ThoughtPlace.NOWHERE: _State.TEXT,
    ThoughtPlace.MARKED: _State.BEFORE,
    ThoughtPlace.OPENED: _State.INSIDE,
}


class ThoughtParser:
    """Reads the text of one choice."""

    def __init__(self, place: ThoughtPlace) -> None:
        self._state = START_STATES[place]
        self._has_thought = False
        self._held = ""  # text whose meaning is not certain yet

    def push(self, text: str) -> tuple[str, str]:
        """Take new text; return what is certain of thoughts and of text."""
        self._held += text
        if self._state is _State.BEFORE:
            self._enter()
        thought = self._take_thought() if self._state is _State.INSIDE else ""
        if self._state is _State.BEHIND:
            self._held = self._held.lstrip()
            self._state = _State.TEXT if self._held else _State.BEHIND
        shown = ""
        if self._state is _State.TEXT:
            shown, self._held = self._held, ""
        return thought, shown

    def flush(self) -> tuple[str, str]:
        """The text is complete: what is still held is a thought without an end, or was text all along."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._state is _State.INSIDE else ("", held)

    def _enter(self) -> None:
        """Decide whether the answer starts with thoughts, as soon as that is certain."""
        start = self._held.lstrip()
        if start.startswith(THOUGHT_START):
            self._held, self._state = start.removeprefix(THOUGHT_START), _State.INSIDE
        elif not THOUGHT_START.startswith(start):
            self._state = _State.TEXT

    def _take_thought(self) -> str:
        """Let thoughts out, but for white space that may turn out to be their last and half a marker."""
        thought, end, rest = self._held.partition(THOUGHT_END)
        if end:
            self._held, self._state = rest, _State.BEHIND
            certain = thought.rstrip()
        else:
            sure = thought[: len(thought) - num_held_back(thought, [THOUGHT_END])].rstrip()
            certain, self._held = sure, thought[len(sure) :]
        if not self._has_thought:
            certain = certain.lstrip()
            self._has_thought = bool(certain)
        return certain
