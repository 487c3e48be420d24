"""What-if: exact shares of the ring, and which live sessions a change would move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.ring import Ring, key_hash
from gateway.routing.what_if import forecast, moved_share, ring_shares
from gateway.values import BackendId, SessionKey

WEIGHTS = st.dictionaries(
    st.sampled_from([BackendId(f"b{number}") for number in range(6)]),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    max_size=6,
)
KEYS = [f"key-{number}" for number in range(2000)]


def first(ring: Ring, key: str) -> BackendId | None:
    return next(ring.walk(key), None)


@given(WEIGHTS)
def test_shares_sum_to_one(weights: dict[BackendId, float]) -> None:
    """Every key has one first choice, if there is any backend with weight."""
    shares = ring_shares(Ring(weights, 16))
    assert sum(shares.values()) == pytest.approx(1.0 if any(weights.values()) else 0.0)
    assert shares.keys() == {name for name, weight in weights.items() if weight > 0}


@given(WEIGHTS, WEIGHTS)
def test_the_moved_share_is_what_counting_keys_finds(
    before: dict[BackendId, float], after: dict[BackendId, float]
) -> None:
    """Arithmetic on arcs agrees with asking both rings about many keys."""
    old, new = Ring(before, 16), Ring(after, 16)
    counted = sum(first(old, key) != first(new, key) for key in KEYS) / len(KEYS)
    assert moved_share(old, new) == pytest.approx(counted, abs=0.05)


def test_shares_are_those_of_many_keys() -> None:
    """The arcs belong to whom `walk` says."""
    ring = Ring({BackendId("a"): 1.0, BackendId("b"): 3.0}, 64)
    shares = ring_shares(ring)
    counted = sum(first(ring, key) == "b" for key in KEYS) / len(KEYS)
    assert shares[BackendId("b")] == pytest.approx(counted, abs=0.04)
    assert key_hash("x") != key_hash("y")


def test_only_sessions_of_a_removed_backend_move() -> None:
    """Each to its successor on the new ring; all others stay where they are, whatever else changes."""
    before = {BackendId("a"): 1.0, BackendId("b"): 1.0, BackendId("c"): 1.0}
    after = {BackendId("b"): 5.0, BackendId("c"): 0.0, BackendId("d"): 1.0}
    sessions = [(SessionKey(key), BackendId("abc"[number % 3]), 100) for number, key in enumerate(KEYS[:300])]
    judged = forecast(before, after, 64, sessions)
    assert (judged.num_sessions, judged.num_sessions_moved) == (300, 100)
    assert (judged.num_tokens, judged.num_tokens_moved) == (30_000, 10_000)
    assert judged.backends[BackendId("a")].sessions_after == 0
    assert judged.backends[BackendId("c")].sessions_after == 100  # its own stay; weight 0 takes no others
    assert sum(one.sessions_after for one in judged.backends.values()) == 300


def test_removing_the_last_backend_leaves_nowhere_to_go() -> None:
    """All sessions move, and none arrives."""
    judged = forecast({BackendId("a"): 1.0}, {}, 64, [(SessionKey("k"), BackendId("a"), 7)])
    assert judged.ring_share_moved == 1.0
    assert judged.num_sessions_moved == 1
    assert sum(one.sessions_after for one in judged.backends.values()) == 0


@given(WEIGHTS)
def test_no_change_moves_nothing(weights: dict[BackendId, float]) -> None:
    """The same fleet is the same ring."""
    assert moved_share(Ring(weights, 16), Ring(dict(weights), 16)) == 0.0
