"""Turns token ids into text as they arrive, without cutting characters or showing stop strings.

Decides what can be shown already. Invariants, whatever the number of ids per call:

* the pieces together are exactly the decoded whole (up to the first stop string, if there is one);
* no piece ends inside a character that a later id may complete, and none contains the start of what may
  become a stop string.

Decoding is not additive (a leading space may vanish, a character may span ids), so each piece is the
difference of two decodes over a short window that starts at an earlier clean boundary, as in Hugging Face's
text-generation-inference. Cost: two decodes of a few ids per call. It does not know why a sequence ends,
except by a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# An unfinished character of k bytes decodes to at most k marks (one in byte-level BPE, one a byte with byte
# fallback), and k is at most 3.
MOST_PENDING_MARKS = 3


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """The text of one growing sequence."""

    def __init__(self, decoder: Decoder, *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # ids since the second-to-last clean boundary
        self._num_context_ids = 0  # leading ids of the window that end at the last clean boundary
        self._num_shown_characters = 0  # of the window's text

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; return the text that is now certain. Changes: the window."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        certain = len(text) - _num_pending_marks(text)
        piece = text[self._num_shown_characters : certain]
        self._num_shown_characters = max(certain, self._num_shown_characters)
        if certain == len(text) and len(self._window) > self._num_context_ids:
            self._window = self._window[self._num_context_ids :]
            self._num_context_ids = len(self._window)
            self._num_shown_characters = len(self._decode(self._window))
        return piece

    def flush(self) -> str:
        """The sequence has ended: return what was held back."""
        text = self._decode(self._window)
        piece = text[self._num_shown_characters :]
        self._num_shown_characters = len(text)
        return piece

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _num_pending_marks(text: str) -> int:
    """How many characters at the end may still become part of another."""
    count = len(text) - len(text.rstrip(REPLACEMENT))
    return min(count, MOST_PENDING_MARKS)


class StopStrings:
    """Passes text on up to the first stop string that is complete."""

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
        # The first to be complete wins, as if text came character by character, so chunking does not matter.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            end, at, self.matched = min(found)
            end = end if self._include_stop else at
            piece, self._held = self._held[:end], ""
            return piece
        keep = num_held_back(self._held, self._stops)
        piece, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return piece

    def flush(self) -> str:
        """The text has ended: what was held back is ordinary text."""
        piece, self._held = self._held, ""
        return piece


def num_held_back(text: str, markers: Sequence[str]) -> int:
    """Length of the longest suffix of the text that is a proper prefix of a marker."""
    longest = max((len(marker) for marker in markers), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        ending = text[-length:]
        if any(marker.startswith(ending) for marker in markers):
            return length
    return 0
