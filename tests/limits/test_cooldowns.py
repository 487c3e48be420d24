"""What a backend's Retry-After says and how long it holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.cooldowns import Cooldowns, parse_retry_after
from gateway.values import BackendId

A, B = BackendId("a"), BackendId("b")
NOON_S = 784_111_777.0  # Sun, 06 Nov 1994 08:49:37 GMT, the date of RFC 9110's examples


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"120", 120.0),
        (b" 0 ", 0.0),
        (b"1.5", 1.5),
        (b"Sun, 06 Nov 1994 08:49:47 GMT", 10.0),
        (b"Sun, 06 Nov 1994 08:49:30 GMT", 0.0),
        (b"-5", None),
        (b"", None),
        (b"soon", None),
        (b"1e999", None),
        (b"9" * 300, 365 * 86_400.0),
        (b"nan", None),
        (b"\xff", None),
    ],
)
def test_seconds_and_dates_are_understood(value: bytes, seconds: float | None) -> None:
    """Both forms of RFC 9110; a date in the past is now; nonsense is nothing."""
    assert parse_retry_after(value, NOON_S) == seconds


@given(st.binary(max_size=40))
def test_no_header_value_is_an_error(value: bytes) -> None:
    """A backend may send anything."""
    seconds = parse_retry_after(value, NOON_S)
    assert seconds is None or 0.0 <= seconds < float("inf")


def test_a_rest_ends_and_is_capped() -> None:
    """No cooldown is longer than the cap; the latest answer counts."""
    cooldowns = Cooldowns(60.0)
    cooldowns.note(A, 5.0, 0.0)
    cooldowns.note(B, 1e6, 0.0)
    assert cooldowns.cooling(4.9) == [A, B]
    assert cooldowns.cooling(5.0) == [B]
    assert cooldowns.cooling(60.0) == []
    cooldowns.note(A, 50.0, 100.0)
    cooldowns.note(A, 1.0, 100.0)
    assert cooldowns.cooling(101.0) == []
