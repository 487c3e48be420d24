"""Canonical forms of system prompts and messages, for hashing only.

The forwarded bytes are never changed. A string and a list with that one text are equal, and text that is
configured as volatile (dates, clock times, Claude Code's per-request billing line) does not count. Messages
are compared without cache markers. Knows no tenant, model or key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.wire.dates import replace_dates
from gateway.wire.settings import Normaliser

_MESSAGE: Final = msgspec.json.Decoder(dict[str, object])
_PARTS: Final = msgspec.json.Decoder(list[msgspec.Raw])

# Matches only an object key: inside a string its quotes would be escaped.
_CACHE_CONTROL: Final = re.compile(rb'"cache_control"\s*:\s*(?:\{[^{}]*\}|null)')


class _Part(msgspec.Struct):
    text: str | None = None


_PART: Final = msgspec.json.Decoder(_Part)
_TEXT: Final = msgspec.json.Decoder(str)
_EDGE: Final = 65_536


class TextNormaliser:
    """Replaces volatile text with constants: first the configured expressions in order, then dates."""

    def __init__(self, normalisers: Sequence[Normaliser], *, ignores_dates: bool) -> None:
        self._substitutions = tuple((re.compile(each.pattern), each.replacement) for each in normalisers)
        self._ignores_dates = ignores_dates

    def normalise(self, text: str) -> str:
        """Return `text` with volatile parts replaced.

        Only the first and last 64 Ki characters are searched, which bounds the cost of a request; volatile
        text is usually at one of the ends.
        """
        if len(text) <= 2 * _EDGE:
            return self._replace(text)
        return self._replace(text[:_EDGE]) + text[_EDGE:-_EDGE] + self._replace(text[-_EDGE:])

    def _replace(self, text: str) -> str:
        for pattern, replacement in self._substitutions:
            text = pattern.sub(replacement, text)
        return replace_dates(text) if self._ignores_dates else text


def content_texts(content: bytes) -> list[str]:
    """Return the texts of a JSON content value: a string, a list of parts, or anything else unchanged.

    Never fails: content that cannot be decoded is compared byte by byte.
    """
    if content[:1] == b'"':
        return [_text_or_raw(content)]
    if content[:1] != b"[":
        return [] if content in (b"", b"null") else [content.decode("latin-1")]
    try:
        parts = _PARTS.decode(content)
    except (msgspec.DecodeError, RecursionError):
        return [content.decode("latin-1")]
    return [_part_text(bytes(part)) for part in parts]


def without_cache_control(value: bytes) -> bytes:
    """Return the JSON bytes without `cache_control` members, which clients move from turn to turn."""
    if b'"cache_control"' not in value:
        return value
    kept, start = [], 0
    for found in _CACHE_CONTROL.finditer(value):
        before = value[start : found.start()].rstrip()
        kept.append(before.removesuffix(b","))
        start = found.end()
    return b"".join([*kept, value[start:]])


def canonical_message(message: bytes) -> bytes:
    """Return a message without cache markers, and with a single text part as a plain string.

    Clients mark the newest messages and turn their content into a list to do so; one turn later the same
    message arrives as a string. A message that cannot be decoded is returned unchanged.
    """
    try:
        fields = _MESSAGE.decode(without_cache_control(message))
        content = fields.get("content")
        if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
            part = content[0]
            if part.keys() == {"type", "text"} and isinstance(part["text"], str):
                fields["content"] = part["text"]
        return msgspec.json.encode(fields)
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError):
        return message


def _part_text(part: bytes) -> str:
    if part[:1] == b'"':
        return _text_or_raw(part)
    try:
        text = _PART.decode(part).text
    except (msgspec.DecodeError, RecursionError):
        text = None
    return without_cache_control(part).decode("latin-1") if text is None else text


def _text_or_raw(value: bytes) -> str:
    try:
        return _TEXT.decode(value)
    except msgspec.DecodeError:
        return value.decode("latin-1")
