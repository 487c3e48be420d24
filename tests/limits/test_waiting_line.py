"""Who waits, in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.waiting_line import Ticket, WaitingLine

ranks = st.lists(st.integers(0, 5).map(float), max_size=30)


def drained(line: WaitingLine[int]) -> list[int]:
    return [line.next() for _ in range(len(line))]


def test_equal_ranks_are_served_in_order_of_arrival() -> None:
    """First come, first served."""
    line: WaitingLine[int] = WaitingLine()
    for number in range(5):
        line.join(1.0, number)
    assert drained(line) == [0, 1, 2, 3, 4]


def test_nobody_is_next_in_an_empty_line() -> None:
    """Asking an empty line is a mistake of the caller."""
    with pytest.raises(IndexError):
        WaitingLine[int]().next()


@given(ranks)
def test_order_is_a_stable_sort_by_rank(given_ranks: list[float]) -> None:
    """Whatever the order of arrival, the line serves by rank, then by arrival."""
    line: WaitingLine[int] = WaitingLine()
    for number, rank in enumerate(given_ranks):
        line.join(rank, number)
    assert drained(line) == sorted(range(len(given_ranks)), key=lambda number: given_ranks[number])


@given(ranks, st.data())
def test_leavers_are_gone_and_the_others_keep_their_order(
    given_ranks: list[float], data: st.DataObject
) -> None:
    """Any waiter may leave, more than once; nobody else is served differently."""
    line: WaitingLine[int] = WaitingLine()
    tickets: list[Ticket] = [line.join(rank, number) for number, rank in enumerate(given_ranks)]
    leavers = data.draw(st.sets(st.sampled_from(range(len(tickets))))) if tickets else set()
    for number in [*leavers, *leavers]:
        line.leave(tickets[number])
    assert len(line) == len(tickets) - len(leavers)
    expected = sorted(range(len(given_ranks)), key=lambda number: given_ranks[number])
    assert drained(line) == [number for number in expected if number not in leavers]


@given(st.lists(st.tuples(st.floats(0, 1, allow_nan=False), st.booleans()), max_size=60))
def test_a_lead_cannot_starve_anybody(arrivals: list[tuple[float, bool]]) -> None:
    """A waiter without priority is passed only by those who came at most one lead later."""
    lead_s = 5.0
    line: WaitingLine[tuple[float, bool]] = WaitingLine()
    now_s, joined = 0.0, []
    for gap_s, is_follow_up in arrivals:
        now_s += gap_s
        joined.append((now_s, is_follow_up))
        line.join(now_s - lead_s * is_follow_up, (now_s, is_follow_up))
    served = [line.next() for _ in joined]
    for place, (arrived_s, is_follow_up) in enumerate(served):
        if not is_follow_up:
            assert all(other_s <= arrived_s + lead_s for other_s, _ in served[:place])
