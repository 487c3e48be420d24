"""What tells one unnamed conversation from another: a sentence of its system prompt, and how it began.

A client that names no session sends the whole conversation each turn, so the beginning of the conversation is
its name. Two things make that harder than hashing the first messages:

* Many conversations begin with "Hi". While the user's first words are too few to tell, the beginning goes on
  through the first answer and what the user, or a tool, said next. So such a conversation has no name in its
  first turn, and one that stays from its second turn on.
* System prompts carry clocks, counters, git status. Dates have too many forms to list, in too many languages.
  So of a system prompt only its longest sentence without digits and names of days or months counts, which
  hardly ever is the part that changes.

Invariant: a longer conversation has the same beginning, whichever cache markers its client has moved
meanwhile and whatever it leaves out of its answers but their text. Pure; knows no tenants and no hashes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from gateway.wire.normalise import canonical_message, without_cache_control

_EMPTY_MESSAGE: Final = len(b'{"role":"user","content":""}')
_CANONICAL_BYTES: Final = 262_144  # larger messages are mostly pictures; they are compared as they came
_SEARCHED: Final = 65_536  # characters of a system prompt
_SEARCHED_TOOLS: Final = 1_024  # lists of tools grow at their end
_SENTENCE_BYTES: Final = 400  # more of a sentence tells no more
_MIN_WORDS: Final = 4

INPUT_ROLES: Final = frozenset({"user", "tool", "function"})
"""Roles of what goes into the model after an answer; items of the Responses API end in `_output`."""

_ENDS: Final = bytes(
    0x0A if code in b"\r\n.!?;" else 0x30 if code in b"0123456789" else code for code in range(256)
)
_WIDE_ENDS: Final = re.compile("[。！？；।]")
# Digits of any script, and Chinese numerals where they spell dates: 二〇二六年, 七月.
_NUMERALS: Final = "〇零一二三四五六七八九十廿卅"
_DIGIT: Final = re.compile(rf"\d|[{_NUMERALS}][{_NUMERALS}年月日号號时時点點分秒]")
_DAY_OR_MONTH: Final = re.compile(
    r"\b(?:"
    # English, German, Dutch, Swedish
    r"(?:mon|tues|wednes|thurs|fri|satur|sun)day|(?:mon|diens|donners|frei|sams|sonn)tag|mittwoch|sonnabend"
    r"|(?:maan|dins|woens|donder|vrij|zater|zon)dag|(?:mån|tis|ons|tors|fre|lör|sön)dag"
    r"|janu?ar[yi]?|febru?ar[yi]?|march|märz|april|june|juni|july|juli|august|(?:sept|nov|dec)ember|october"
    r"|oktober|dezember"
    # French, Spanish, Portuguese, Italian
    r"|(?:lun|mar|mercre|jeu|vendre|same)di|dimanche|lunes|martes|miércoles|jueves|viernes|sábado|domingo"
    r"|(?:segunda|terça|quarta|quinta|sexta)-feira|(?:lune|marte|mercole|giove|vener)dì|sabato|domenica"
    r"|janvier|février|mars|avril|juin|juillet|août|septembre|octobre|novembre|décembre"
    r"|enero|febrero|marzo|abril|mayo|junio|julio|agosto|septiembre|octubre|noviembre|diciembre"
    r"|janeiro|fevereiro|março|maio|junho|julho|setembro|outubro|dezembro"
    r"|gennaio|febbraio|aprile|maggio|giugno|luglio|settembre|ottobre|dicembre"
    # Polish, Russian
    r"|poniedziałek|wtorek|środa|czwartek|piątek|sobota|niedziela"
    r"|понедельник|вторник|сред[ау]|четверг|пятниц[ау]|суббот[ау]|воскресенье"
    r")\b|星期|曜日|요일",
    re.IGNORECASE,
)


class _Content(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"")


class _Part(msgspec.Struct):
    type: str = "text"
    text: str = ""


_CONTENT: Final = msgspec.json.Decoder(_Content)
_ANSWER: Final = msgspec.json.Decoder(str | list[_Part] | None)


def opening_of(
    messages: list[bytes], first_user: int, role_of: Callable[[bytes], str], min_bytes: int
) -> tuple[list[bytes], int]:
    """Return the beginning of a conversation and the index of the message after it; ([], 0): not told yet.

    `first_user` is the index of the first user turn. `min_bytes` of the user's text suffice.
    """
    parts: list[bytes] = []
    num_bytes = 0
    has_answer = False
    for index in range(first_user, len(messages)):
        message = messages[index]
        role = role_of(message)
        if role in ("system", "developer"):
            continue
        if role in INPUT_ROLES or role.endswith("_output"):
            parts.append(_canonical(message))
            num_bytes += len(parts[-1]) - _EMPTY_MESSAGE
            if has_answer or num_bytes >= min_bytes:
                return parts, index + 1
        else:
            parts.append(_answer_text(message))
            has_answer = True
    return [], 0


def stable_sentence(texts: Iterable[str], tools: bytes) -> list[bytes]:
    """Return the sentences that stand for system prompt and tools; b"" for what has none."""
    searched = tools[:_SEARCHED_TOOLS].decode("utf-8", "replace").replace('"', "\n")
    return [_longest("\n".join(texts)[:_SEARCHED]), _longest(searched)]


def _canonical(message: bytes) -> bytes:
    return canonical_message(message) if len(message) <= _CANONICAL_BYTES else without_cache_control(message)


def _answer_text(message: bytes) -> bytes:
    """Return the text of an answer: clients leave the thoughts out of answers that they repeat."""
    try:
        content = _ANSWER.decode(_CONTENT.decode(message).content)
    except (msgspec.DecodeError, RecursionError):
        return b""
    if content is None:
        return b""
    if not isinstance(content, str):
        content = "".join([part.text for part in content if part.type in ("text", "output_text")])
    return content.strip().encode("utf-8", "surrogatepass")


def _longest(text: str) -> bytes:
    """Return the longest sentence of several words that names no number, day or month; else the longest part.

    The first of equals.
    """
    encoded = _WIDE_ENDS.sub("\n", text).encode("utf-8", "surrogatepass")
    parts = list(_steady(encoded))
    return next(filter(_is_sentence, parts), parts[0] if parts else b"")


def _steady(text: bytes) -> Iterator[bytes]:
    """Yield the parts that no clock or counter is in, longest first. O(n log n) in the number of parts."""
    parts = [part.strip() for part in text.translate(_ENDS).split(b"\n") if b"0" not in part]
    for part in sorted(parts, key=len, reverse=True):
        head = part[:_SENTENCE_BYTES]
        read = head.decode("utf-8", "ignore")
        if head and not (_DIGIT.search(read) or _DAY_OR_MONTH.search(read)):
            yield head


def _is_sentence(part: bytes) -> bool:
    """Whether it has several words; scripts without spaces have more bytes to a letter."""
    return part.count(b" ") >= _MIN_WORDS - 1 or not part.isascii()
