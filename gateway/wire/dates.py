"""Replaces dates and clock times in text with constants, cheaply.

Prompts often contain the current date or time, which would make each one a new prompt. Regular expressions
over a whole system prompt cost about 100 ns per character, more than the rest of the request. So they run
only on windows around two shapes, one of which every date or time has: four digits in a row (a year) and
digit-colon-two-digits (a clock). Finding these takes one translation of the text and two plain searches,
about 2 ns per character.

Invariant: the result depends only on the text. Knows the forms below, in English only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

# One byte per character: every digit becomes `0`, the colon stays, everything else becomes a blank.
_SHAPES: Final = bytes(
    0x30 if 0x30 <= code <= 0x39 else 0x3A if code == 0x3A else 0x20 for code in range(256)
)
_TRIGGERS: Final = (b"0000", b"0:00")
# From a trigger to either end of the longest form: "Wednesday, September 30th, 2026", 2026-…T…+01:00.
_REACH: Final = 48

_MONTH: Final = r"(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}\.?"
_DAY: Final = r"\d{1,2}(?:st|nd|rd|th)?"
_WEEKDAY: Final = r"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6},?\s{1,3})?"
_DATE: Final = re.compile(
    # 2026-11-29, 2026-11-29T08:15:00.123Z, 2026-11-29 08:15:00+01:00
    r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:Z|[+-]\d{2}:?\d{2})?)?"
    # 2026/11/29, 29/11/2026, 29.11.2026
    r"|\b(?:\d{4}/\d{1,2}/\d{1,2}|\d{1,2}([/.])\d{1,2}\1\d{4})\b"
    # Sunday, November 29th, 2026 and Sun 29 Nov 2026
    rf"|\b{_WEEKDAY}(?:{_MONTH}\s{{1,3}}{_DAY}|{_DAY}\s{{1,3}}{_MONTH}),?\s{{1,3}}\d{{4}}\b"
)
# 8:15, 08:15:07.5, 8:15 PM, 8:15 p.m.
_CLOCK: Final = re.compile(r"\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:\s?(?:[AaPp]\.[Mm]\.|[AaPp][Mm]\b))?")


def replace_dates(text: str) -> str:
    """Return `text` with dates as `<date>` and times as `<time>`. O(len(text))."""
    shape = text.encode("latin-1", "replace").translate(_SHAPES)
    pieces = []
    done = 0
    for start, end in _windows(shape):
        pieces.append(text[done:start])
        pieces.append(_CLOCK.sub("<time>", _DATE.sub("<date>", text[start:end])))
        done = end
    return text if not pieces else "".join([*pieces, text[done:]])


def _windows(shape: bytes) -> Iterator[tuple[int, int]]:
    """Yield the parts of the text that may contain a date or time, in order and disjoint.

    [ … start ←─ _REACH ─→ trigger ←─ _REACH ─→ end … ], joined where two would touch.
    """
    year, clock = (shape.find(trigger) for trigger in _TRIGGERS)
    start = end = -1
    while year >= 0 or clock >= 0:
        if clock < 0 or 0 <= year < clock:
            trigger = year
            year = shape.find(_TRIGGERS[0], year + 4)
        else:
            trigger = clock
            clock = shape.find(_TRIGGERS[1], clock + 4)
        if end >= 0 and trigger - _REACH > end:
            yield start, end
            start = trigger - _REACH
        elif end < 0:
            start = max(0, trigger - _REACH)
        end = min(len(shape), trigger + _REACH)
    if end >= 0:
        yield start, end
