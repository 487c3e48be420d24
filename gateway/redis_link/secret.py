"""A value that must not appear in logs, dumps or error messages by accident."""

from __future__ import annotations


class Secret:
    """Text whose repr and str are masked; only `reveal()` returns it, which is easy to search for."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)

    def __repr__(self) -> str:
        return "Secret('***')" if self._text else "Secret('')"

    __str__ = __repr__
