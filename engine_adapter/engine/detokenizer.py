"""Token ids become text piece by piece, with no character cut and no stop string let through.

Decides what may be shown already. Two invariants, whatever the number of ids per call:

* the pieces together are exactly the decoded whole (up to the first stop string, where there is one);
* no piece ends within a character that a later id may complete, nor holds the start of what may become
  a stop string.

A tokenizer's decode is not additive (a leading space may vanish, a character may span ids), so each piece
is the difference of two decodes over a short window that starts at an earlier clean boundary, as in
Hugging Face's text-generation-inference. Cost: two decodes of a few ids per call.
It does not know why a sequence ends, except for stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
LONGEST_PENDING = 16  # ids; UTF-8 needs at most 4 bytes, so a longer run of broken bytes is shown as it is


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """The text of one growing sequence."""

    def __init__(self, decoder: Decoder, *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # ids since the last boundary but one
        self._num_shown = 0  # ids of the window whose text is out

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new ids; return the text that is now certain. Changes: the window."""
        self._window.extend(token_ids)
        piece = self._difference()
        is_cut = piece.endswith(REPLACEMENT) and len(self._window) - self._num_shown < LONGEST_PENDING
        if not piece or is_cut:
            return ""
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        return piece

    def flush(self) -> str:
        """The sequence is over: return what was held back."""
        piece = self._difference()
        self._num_shown = len(self._window)
        return piece

    def _difference(self) -> str:
        shown = self._decode(self._window[: self._num_shown])
        return self._decode(self._window)[len(shown) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Lets text through up to the first occurrence of any stop string."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that cannot be part of a stop string. Changes: `matched` once one is found."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, _, self.matched = min(found)
            end = at + len(self.matched) if self._include_stop else at
            piece, self._held = self._held[:end], ""
            return piece
        keep = self._longest_possible_start()
        piece, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return piece

    def flush(self) -> str:
        """No more text comes: what was held back is ordinary text."""
        piece, self._held = self._held, ""
        return piece

    def _longest_possible_start(self) -> int:
        """Length of the longest end of the held text with which some stop string begins."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            ending = self._held[-length:]
            if any(stop.startswith(ending) for stop in self._stops):
                return length
        return 0
