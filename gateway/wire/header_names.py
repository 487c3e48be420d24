"""Caches what a header name means to one reader, by the spelling in which it arrived.

Requests repeat the same dozen names, so the result for a spelling (its lower case, whether it is in a set,
which prefix it has) is remembered. Names come from clients, so the number of spellings is bounded. The cache
changes no result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

_MAX_SPELLINGS: Final = 1_024
_Meaning = TypeVar("_Meaning")


class HeaderNames(dict[bytes, _Meaning]):
    """`names[spelling]` is the meaning of the name in lower case."""

    def __init__(self, meaning_of: Callable[[bytes], _Meaning]) -> None:
        """`meaning_of` is called with names in lower case and must be pure."""
        super().__init__()
        self._meaning_of = meaning_of

    def __missing__(self, spelling: bytes) -> _Meaning:
        meaning = self._meaning_of(spelling.lower())
        if len(self) < _MAX_SPELLINGS:
            self[spelling] = meaning
        return meaning
