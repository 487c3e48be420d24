"""Dates and clocks in text: which forms are known, and that looking only at windows misses none."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.wire.dates import _CLOCK, _DATE, replace_dates

DATES = [
    "2026-11-29", "2026-11-29T08:15", "2026-11-29T08:15:00Z", "2026-11-29 08:15:00.123456+01:00",
    "2026/11/29", "29/11/2026", "1.2.2026", "November 29, 2026", "Nov. 29th 2026", "29 November 2026",
    "3rd Dec 2026",
    "Sunday, November 29, 2026", "Wednesday, September 30th, 2026", "Sun 29 Nov 2026",
]  # fmt: skip
CLOCKS = ["08:15", "8:15:07", "08:15:07.250", "8:15 PM", "8:15am", "11:05 p.m."]
NO_DATES = [
    "2026", "1.2.3", "12/34", "10.0.0.1", "v2026.1", "3:4", "http://host:8000/x", "May I?", "March on",
    "x" * 60, "12345678", "é" * 30, "\ud83d", "0000000000", "",
]  # fmt: skip


@pytest.mark.parametrize("text", DATES)
def test_dates_become_one_word(text: str) -> None:
    """Each documented form, at the start, in the middle and at the end."""
    assert replace_dates(f"{text} was. On {text}, and {text}") == "<date> was. On <date>, and <date>"


@pytest.mark.parametrize("text", CLOCKS)
def test_clocks_become_one_word(text: str) -> None:
    """Each documented form; a full stop after it stays."""
    assert replace_dates(f"{text}, at {text} or {text}") == "<time>, at <time> or <time>"


@pytest.mark.parametrize("text", NO_DATES)
def test_other_text_is_kept(text: str) -> None:
    """Versions, addresses, ratios, ports and the names of months are no dates."""
    assert replace_dates(text) == text


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([*DATES, *CLOCKS, *NO_DATES, " ", ". ", "x", "1", ":"]), max_size=14).map(
        "".join
    )
    | st.text(alphabet="0129:-/. TZJune,", max_size=200)
)
@example("x" * 47 + "2026-11-29" + "y" * 38 + "08:15")
def test_windows_find_what_a_full_search_finds(text: str) -> None:
    """However near to each other or to a window's edge they stand, glued to other text or not."""
    assert replace_dates(text) == _CLOCK.sub("<time>", _DATE.sub("<date>", text))
