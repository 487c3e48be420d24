"""Names for requests, that nobody can guess and no two requests share.

Engines name their work by the id that they are sent, and mix up two requests that have the same one at the
same time. So a client's own id, which another client may use too, is followed by an id of ours on its way to
an engine; the client and the access line keep it as it is.
"""

from __future__ import annotations

import os
from typing import Final

_NUM_DIGITS: Final = 32
_NUM_AT_ONCE: Final = 128
_MAX_GIVEN_LENGTH: Final = 64


class RequestIds:
    """Random ids. The system is asked for many at once, because to ask costs more than to cut one off."""

    def __init__(self) -> None:
        self._digits, self._at = "", 0

    def new(self) -> str:
        """Return an id of 128 random bits."""
        at = self._at
        if at == len(self._digits):
            self._digits, at = os.urandom(_NUM_DIGITS // 2 * _NUM_AT_ONCE).hex(), 0
        self._at = at + _NUM_DIGITS
        return f"req-{self._digits[at : at + _NUM_DIGITS]}"

    def for_engine(self, given: str) -> str:
        """Return an id for an engine: the beginning of the client's, to be found by, and a new one."""
        return f"{given[:_MAX_GIVEN_LENGTH]}-{self.new()}"
