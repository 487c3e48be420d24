"""Values from Redis are data to be checked."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sessions.codec import decode_reply, is_storable
from gateway.values import BackendId


def test_well_formed_value_is_read() -> None:
    """All five fields come through, and the rest of life becomes a time on the caller's clock."""
    record = decode_reply([b"1 17 3 4096 12 gpu-0.a_b", 1500], now_s=10.0)
    assert record is not None
    assert (record.version, record.epoch, record.context_tokens, record.num_turns) == (17, 3, 4096, 12)
    assert record.backend_id == "gpu-0.a_b"
    assert record.expires_at_s == 11.5


@pytest.mark.parametrize(
    "reply",
    [
        None,
        0,
        -1,
        b"1 1 1 1 1 a",
        [],
        [b"1 1 1 1 1 a"],
        [b"1 1 1 1 1 a", -1],
        [b"1 1 1 1 1 a", b"5"],
        ["1 1 1 1 1 a", 5],
        [b"2 1 1 1 1 a", 5],
        [b"1 1 1 1 a", 5],
        [b"1 -1 1 1 1 a", 5],
        [b"1 1 1 1 1 ", 5],
        [b"1 1 1 1 1 http://evil:80/", 5],
        [b"1 1 1 1 1 a b", 5],
        [b"1 1 1 1 1 a\n", 5],
        [b"1 1 1 1 1 " + b"a" * 65, 5],
        [b"1 1.5 1 1 1 a", 5],
        [b"1 1 1 1 1 \xff", 5],
        [b"1 \xd9\xa1 1 1 1 a", 5],
        [b"1 " + b"9" * 200 + b" 1 1 1 a", 5],
        {"a": 1},
    ],
)
def test_anything_odd_is_absent(reply: object) -> None:
    """Wrong types, fields, signs, alphabets, lengths and addresses are no binding."""
    assert decode_reply(reply, now_s=0.0) is None


@given(st.binary(max_size=150), st.integers())
def test_no_bytes_raise(value: bytes, ttl_ms: int) -> None:
    """Whatever lies in Redis, reading it raises nothing, and what is read has a plain name."""
    record = decode_reply([value, ttl_ms], now_s=0.0)
    if record is not None:
        assert is_storable(record.backend_id, 0, 0)
        assert math.isfinite(record.expires_at_s)


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "é", "a\n", "http://x", "{x}"])
def test_unreadable_names_are_not_written(name: str) -> None:
    """A backend id that would not be read back is refused before it is written."""
    assert not is_storable(BackendId(name), 0, 0)


def test_unreadable_numbers_are_not_written() -> None:
    """Negative or absurd numbers are refused before they are written."""
    a = BackendId("a")
    assert is_storable(a, 1_700_000_000, 1_000_000)
    assert not is_storable(a, -1, 0)
    assert not is_storable(a, 10**18, 0)
    assert not is_storable(a, 0, -1)
    assert not is_storable(a, 0, 10**12)
