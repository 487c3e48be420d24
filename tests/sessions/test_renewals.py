"""Renewals waiting to be sent."""

from __future__ import annotations

from gateway.sessions.renewals import PendingRenewals, Renewal
from gateway.values import SessionKey

K1, K2, K3 = SessionKey("1"), SessionKey("2"), SessionKey("3")


def renewal(version: int = 1, num_turns: int = 1) -> Renewal:
    return Renewal(version, 10, num_turns)


def test_turns_of_one_session_become_one_renewal() -> None:
    """Only the last of several waiting renewals of a session is sent."""
    pending = PendingRenewals(10)
    pending.add(K1, renewal(num_turns=1))
    pending.add(K1, renewal(num_turns=2))
    assert pending.take(10) == [(K1, renewal(num_turns=2))]
    assert pending.take(10) == []


def test_older_home_does_not_replace_newer() -> None:
    """A late renewal of a former home is not kept over one of the present home."""
    pending = PendingRenewals(10)
    pending.add(K1, renewal(version=2))
    pending.add(K1, renewal(version=1))
    assert pending.take(10) == [(K1, renewal(version=2))]


def test_bound_drops_the_oldest_and_counts() -> None:
    """Beyond the bound the longest waiting renewal goes."""
    pending = PendingRenewals(2)
    for key in (K1, K2, K3):
        pending.add(key, renewal())
    assert [key for key, _ in pending.take(10)] == [K2, K3]
    assert pending.num_dropped == 1


def test_taking_is_bounded() -> None:
    """The oldest are taken first, and the rest goes on waiting."""
    pending = PendingRenewals(10)
    for key in (K1, K2, K3):
        pending.add(key, renewal())
    assert [key for key, _ in pending.take(2)] == [K1, K2]
    assert [key for key, _ in pending.take(2)] == [K3]


def test_put_back_keeps_order_and_yields_to_newer() -> None:
    """What could not be sent waits first in line again, unless its session had another turn meanwhile."""
    pending = PendingRenewals(10)
    pending.add(K1, renewal(num_turns=1))
    pending.add(K2, renewal(num_turns=1))
    taken = pending.take(10)
    pending.add(K2, renewal(num_turns=2))
    pending.add(K3, renewal(num_turns=1))
    pending.put_back(taken)
    assert pending.take(10) == [
        (K1, renewal(num_turns=1)),
        (K2, renewal(num_turns=2)),
        (K3, renewal(num_turns=1)),
    ]


def test_put_back_respects_the_bound() -> None:
    """A long outage cannot grow the queue beyond its bound."""
    pending = PendingRenewals(2)
    pending.add(K1, renewal())
    pending.add(K2, renewal())
    taken = pending.take(10)
    pending.add(K3, renewal())
    pending.put_back(taken)
    assert [key for key, _ in pending.take(10)] == [K2, K3]


def test_discarded_is_not_sent() -> None:
    """An ended session's renewal is forgotten."""
    pending = PendingRenewals(2)
    pending.add(K1, renewal())
    pending.discard(K1)
    pending.discard(K2)
    assert len(pending) == 0
