"""The breaker: when a store is asked, given up and asked again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.redis_link.breaker import Breaker, BreakerState


def opened() -> Breaker:
    """A breaker that has just opened."""
    breaker = Breaker(1)
    assert breaker.note_failure()
    return breaker


def test_opens_after_failures_in_a_row() -> None:
    """The last of the given number of failures opens it, and says so once."""
    breaker = Breaker(3)
    assert [breaker.note_failure() for _ in range(5)] == [False, False, True, False, False]
    assert breaker.state is BreakerState.OPEN


def test_success_starts_the_count_again() -> None:
    """Failures that are not in a row do not open it."""
    breaker = Breaker(2)
    for _ in range(10):
        breaker.note_failure()
        breaker.note_success()
    assert breaker.is_closed


def test_late_success_does_not_close() -> None:
    """An answer to a question from before is no proof that new ones are answered."""
    breaker = opened()
    breaker.note_success()
    assert breaker.state is BreakerState.OPEN


def test_one_probe_at_a_time() -> None:
    """While a probe runs nobody else may probe, and requests still do not ask."""
    breaker = opened()
    assert breaker.begin_probe()
    assert not breaker.begin_probe()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.is_closed


def test_probe_decides() -> None:
    """A healthy probe closes it, an unhealthy one opens it again for the next probe."""
    breaker = opened()
    breaker.begin_probe()
    breaker.end_probe(is_healthy=False)
    assert breaker.state is BreakerState.OPEN
    breaker.begin_probe()
    breaker.end_probe(is_healthy=True)
    assert breaker.is_closed


def test_closed_needs_no_probe() -> None:
    """A probe does not begin while all is well, and a stray result changes nothing."""
    breaker = Breaker(1)
    assert not breaker.begin_probe()
    breaker.end_probe(is_healthy=False)
    assert breaker.is_closed


@given(st.lists(st.sampled_from(["success", "failure", "begin", "good", "bad"])))
def test_only_a_healthy_probe_closes(events: list[str]) -> None:
    """From open, no sequence without a healthy probe leads to closed."""
    breaker = Breaker(2)
    for event in events:
        before = breaker.state
        match event:
            case "success":
                breaker.note_success()
            case "failure":
                breaker.note_failure()
            case "begin":
                breaker.begin_probe()
            case _:
                breaker.end_probe(is_healthy=event == "good")
        if before is not BreakerState.CLOSED and breaker.is_closed:
            assert (before, event) == (BreakerState.HALF_OPEN, "good")
