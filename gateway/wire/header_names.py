"""What each header name means to one reader, asked by the name as it was spelled.

A request brings the same dozen names again and again, so what is found out about a spelling (its lower case,
whether it stands in a set, whether it begins like something) is remembered. Names come from clients: only so
many spellings are kept. Remembering changes no answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

_MAX_SPELLINGS: Final = 1_024
_Meaning = TypeVar("_Meaning")


class HeaderNames(dict[bytes, _Meaning]):
    """`names[spelling]` is the meaning of the name in lower case."""

    def __init__(self, meaning_of: Callable[[bytes], _Meaning]) -> None:
        """`meaning_of` gets names in lower case and must be pure."""
        super().__init__()
        self._meaning_of = meaning_of

    def __missing__(self, spelling: bytes) -> _Meaning:
        meaning = self._meaning_of(spelling.lower())
        if len(self) < _MAX_SPELLINGS:
            self[spelling] = meaning
        return meaning
