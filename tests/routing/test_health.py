"""Health of backends: consecutive evidence flips, neutral evidence does nothing, relapses stay out longer."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.health import HealthSettings, HealthTable, Outcome, outcome_of_status
from gateway.values import BackendId

A = BackendId("a")


def make_table(**options: Any) -> HealthTable:
    """A table with one backend that is up."""
    table = HealthTable(HealthSettings(healthy_after=1, **options))
    table.observe_probe(A, Outcome.SUCCESS, 0.0)
    return table


def test_a_new_backend_is_down_until_enough_probes_succeed() -> None:
    """A configured backend gets no traffic before it was seen healthy."""
    table = HealthTable(HealthSettings(healthy_after=2))
    assert not table.is_up(A)
    assert not table.observe_probe(A, Outcome.SUCCESS, 0.0)
    assert table.observe_probe(A, Outcome.SUCCESS, 0.1)
    assert table.is_up(A)


def test_consecutive_failures_take_a_backend_out() -> None:
    """The third failure in a row flips it, and only that one reports a flip."""
    table = make_table()
    flips = [table.observe_outcome(A, Outcome.FAILURE, 1.0) for _ in range(3)]
    assert flips == [False, False, True]
    assert not table.is_up(A)


def test_a_success_between_failures_resets_the_streak() -> None:
    """Two failures, a success and two failures leave it in."""
    table = make_table()
    for outcome in (Outcome.FAILURE, Outcome.FAILURE, Outcome.SUCCESS, Outcome.FAILURE, Outcome.FAILURE):
        table.observe_outcome(A, outcome, 1.0)
    assert table.is_up(A)


def test_client_errors_neither_count_nor_heal() -> None:
    """B28: a hundred 4xx leave the backend in; 500s alternating with 400s still take it out."""
    table = make_table()
    for status in (400, 401, 404, 413, 422) * 20:
        table.observe_outcome(A, outcome_of_status(status), 1.0)
    assert table.is_up(A)
    for status in (500, 400, 500, 400, 500):
        table.observe_outcome(A, outcome_of_status(status), 2.0)
    assert not table.is_up(A)


def test_a_neutral_probe_does_not_bring_a_backend_back() -> None:
    """A half-open backend that answers 400 stays where it is."""
    table = make_table()
    for _ in range(3):
        table.observe_outcome(A, Outcome.FAILURE, 1.0)
    assert not table.observe_probe(A, Outcome.NEUTRAL, 60.0)
    assert not table.is_up(A)


def test_overload_with_retry_after_is_not_sickness() -> None:
    """503 with Retry-After is a full queue; without it the backend is failing."""
    assert outcome_of_status(503, has_retry_after=True) is Outcome.NEUTRAL
    assert outcome_of_status(503) is Outcome.FAILURE
    assert outcome_of_status(429) is Outcome.NEUTRAL
    assert outcome_of_status(200) is Outcome.SUCCESS


def test_a_request_never_brings_a_backend_up() -> None:
    """A late answer from before the flip must not reopen a dead backend."""
    table = make_table()
    for _ in range(3):
        table.observe_outcome(A, Outcome.FAILURE, 1.0)
    assert not table.observe_outcome(A, Outcome.SUCCESS, 5.0)
    assert not table.is_up(A)


def test_a_relapse_doubles_the_time_out() -> None:
    """A flapping backend stays out 1 s, then 2 s."""
    table = make_table(min_down_s=1.0)
    for _ in range(3):
        table.observe_outcome(A, Outcome.FAILURE, 10.0)
    assert not table.observe_probe(A, Outcome.SUCCESS, 10.5)
    assert table.observe_probe(A, Outcome.SUCCESS, 11.0)
    for _ in range(3):
        table.observe_outcome(A, Outcome.FAILURE, 12.0)
    assert not table.observe_probe(A, Outcome.SUCCESS, 13.5)
    assert table.observe_probe(A, Outcome.SUCCESS, 14.0)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(list(Outcome)))))
def test_a_reported_flip_is_a_change(events: list[tuple[bool, Outcome]]) -> None:
    """Whatever is observed, `True` is returned exactly when `is_up` has changed."""
    table = HealthTable(HealthSettings())
    for number, (is_probe, outcome) in enumerate(events):
        before = table.is_up(A)
        observe = table.observe_probe if is_probe else table.observe_outcome
        assert observe(A, outcome, float(number)) == (table.is_up(A) != before)


def test_a_good_probe_does_not_excuse_failing_requests() -> None:
    """/health answers while requests are reset: the third failed request takes it out all the same."""
    table = make_table()
    for second in (1.0, 2.0):
        table.observe_outcome(A, Outcome.FAILURE, second)
        table.observe_probe(A, Outcome.SUCCESS, second + 0.5)
    assert table.is_suspect(A)
    assert table.observe_outcome(A, Outcome.FAILURE, 3.0)


def test_request_failures_far_apart_do_not_add_up() -> None:
    """One failure every minute is not a sick backend; the next probe ends the suspicion."""
    table = make_table(request_failure_window_s=30.0)
    for second in (100.0, 160.0, 220.0, 280.0):
        assert not table.observe_outcome(A, Outcome.FAILURE, second)
        assert not table.observe_probe(A, Outcome.SUCCESS, second + 31.0)
        assert not table.is_suspect(A)


def test_a_served_request_speaks_against_slow_probes() -> None:
    """A busy engine that serves but answers probes too late stays in."""
    table = make_table()
    for second in range(10):
        table.observe_probe(A, Outcome.FAILURE, float(second))
        table.observe_outcome(A, Outcome.SUCCESS, second + 0.5)
    assert table.is_up(A)


def test_probes_and_requests_that_fail_together_add_up() -> None:
    """A dead backend is noticed sooner by both kinds of evidence."""
    table = make_table()
    table.observe_probe(A, Outcome.FAILURE, 1.0)
    table.observe_outcome(A, Outcome.FAILURE, 1.1)
    assert table.observe_outcome(A, Outcome.FAILURE, 1.2)
