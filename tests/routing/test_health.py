"""Health of backends: which evidence speaks against one, which for it, and how it comes back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.health import HealthSettings, HealthTable, Outcome, outcome_of_status
from gateway.routing.standing import Standing
from gateway.values import BackendId

A, B = BackendId("a"), BackendId("b")
LATER = 1_000.0
"""Long after any answer, so that nothing excuses a failed probe."""


def make_table(**options: Any) -> HealthTable:
    """A table with one backend that is up."""
    table = HealthTable(HealthSettings(healthy_after=1, **options))
    table.observe_probe(A, Outcome.SUCCESS, 0.0)
    return table


def is_well(table: HealthTable) -> bool:
    return table.standing(A) is Standing.WELL


def observe(table: HealthTable, outcome: Outcome, times: int, now_s: float) -> None:
    for _ in range(times):
        table.observe_outcome(A, outcome, now_s)


def test_a_new_backend_is_down_until_enough_probes_succeed() -> None:
    """A configured backend gets no traffic before it was seen healthy."""
    table = HealthTable(HealthSettings(healthy_after=2))
    assert not is_well(table)
    assert not table.observe_probe(A, Outcome.SUCCESS, 0.0)
    assert table.observe_probe(A, Outcome.SUCCESS, 0.1)
    assert is_well(table)


def test_consecutive_failures_take_a_backend_out() -> None:
    """The third failure in a row flips it, and only that one reports a flip."""
    table = make_table()
    flips = [table.observe_outcome(A, Outcome.FAILURE, 1.0) for _ in range(3)]
    assert flips == [False, False, True]
    assert not is_well(table)


def test_a_success_between_failures_resets_the_streak() -> None:
    """Two failures, a success and two failures leave it in."""
    table = make_table()
    for outcome in (Outcome.FAILURE, Outcome.FAILURE, Outcome.SUCCESS, Outcome.FAILURE, Outcome.FAILURE):
        table.observe_outcome(A, outcome, 1.0)
    assert is_well(table)


def test_client_errors_neither_count_nor_heal() -> None:
    """B28: a hundred 4xx leave the backend in; 500s alternating with 400s still take it out."""
    table = make_table()
    for status in (400, 401, 404, 413, 422) * 20:
        table.observe_outcome(A, outcome_of_status(status), 1.0)
    assert is_well(table)
    for status in (500, 400, 500, 400, 500):
        table.observe_outcome(A, outcome_of_status(status), 2.0)
    assert not is_well(table)


def test_a_neutral_probe_does_not_bring_a_backend_back() -> None:
    """A half-open backend that answers 400 stays where it is."""
    table = make_table()
    for _ in range(3):
        table.observe_outcome(A, Outcome.FAILURE, 1.0)
    assert not table.observe_probe(A, Outcome.NEUTRAL, 60.0)
    assert not is_well(table)


def test_overload_is_not_sickness() -> None:
    """429, 529, and 503 that comes with Retry-After, with a queue in the engine, or in such words."""
    assert outcome_of_status(429) is Outcome.NEUTRAL
    assert outcome_of_status(529) is Outcome.NEUTRAL
    assert outcome_of_status(503, has_retry_after=True) is Outcome.NEUTRAL
    assert outcome_of_status(503, has_queue=True) is Outcome.NEUTRAL
    for words in (b'{"detail":"Queue is full"}', b"Server OVERLOADED", b"at capacity", b"Too many requests"):
        assert outcome_of_status(503, words=words) is Outcome.NEUTRAL
    assert outcome_of_status(503, words=b"no slot available, please try again later") is Outcome.NEUTRAL


def test_other_errors_of_the_server_are_sickness() -> None:
    """A 503 that does not speak of load, and any 500, whatever it says; words far behind are not read."""
    assert outcome_of_status(200) is Outcome.SUCCESS
    assert outcome_of_status(503) is Outcome.FAILURE
    assert outcome_of_status(503, words=b'{"detail":"EngineDeadError"}') is Outcome.FAILURE
    assert outcome_of_status(503, words=b"x" * 5_000 + b"queue") is Outcome.FAILURE
    assert outcome_of_status(500, words=b"queue", has_queue=True) is Outcome.FAILURE


def test_a_request_never_brings_a_backend_up() -> None:
    """A late answer from before the flip must not reopen a dead backend."""
    table = make_table()
    for _ in range(3):
        table.observe_outcome(A, Outcome.FAILURE, 1.0)
    assert not table.observe_outcome(A, Outcome.SUCCESS, 5.0)
    assert not is_well(table)


def test_a_relapse_doubles_the_time_out() -> None:
    """A backend whose process comes and goes stays out 1 s, then 2 s."""
    table = make_table(min_down_s=1.0)

    def vanish(now_s: float) -> None:
        for _ in range(3):
            table.observe_probe(A, Outcome.FAILURE, now_s, is_refused=True)

    vanish(10.0)
    assert not table.observe_probe(A, Outcome.SUCCESS, 10.5)
    assert table.observe_probe(A, Outcome.SUCCESS, 11.0)
    vanish(12.0)
    assert not table.observe_probe(A, Outcome.SUCCESS, 13.5)
    assert table.observe_probe(A, Outcome.SUCCESS, 14.0)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(list(Outcome)))))
def test_a_reported_flip_is_a_change(events: list[tuple[bool, Outcome]]) -> None:
    """Whatever is observed, `True` is returned exactly when the standing has changed."""
    table = HealthTable(HealthSettings())
    for number, (is_probe, outcome) in enumerate(events):
        before = table.standing(A)
        take = table.observe_probe if is_probe else table.observe_outcome
        assert take(A, outcome, float(number)) == (table.standing(A) is not before)


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
    assert is_well(table)


def test_probes_and_requests_that_fail_together_add_up() -> None:
    """A dead backend is noticed sooner by both kinds of evidence."""
    table = make_table()
    table.observe_probe(A, Outcome.FAILURE, 1.0)
    table.observe_outcome(A, Outcome.FAILURE, 1.1)
    assert table.observe_outcome(A, Outcome.FAILURE, 1.2)


# -- answers that flow


def test_answers_that_flow_excuse_failed_probes() -> None:
    """G03: no number of failed probes counts while bytes come, nor just after a complete answer."""
    table = make_table()
    for second in range(20):
        assert not table.observe_probe(A, Outcome.FAILURE, LATER + second, is_answering=True)
    table.observe_outcome(A, Outcome.SUCCESS, LATER + 20.0)
    for _ in range(5):
        assert not table.observe_probe(A, Outcome.FAILURE, LATER + 21.5)
    assert is_well(table)
    flips = [table.observe_probe(A, Outcome.FAILURE, LATER + 30.0) for _ in range(3)]
    assert (flips, table.standing(A)) == ([False, False, True], Standing.FAILED_PROBES)


def test_refused_probes_count_though_answers_flow() -> None:
    """A server that shuts down finishes its streams, and takes no more."""
    table = make_table()
    for _ in range(3):
        table.observe_probe(A, Outcome.FAILURE, LATER, is_refused=True, is_answering=True)
        table.observe_outcome(A, Outcome.SUCCESS, LATER)
    assert table.standing(A) is Standing.REFUSED


@pytest.mark.parametrize("is_complete", [True, False])
def test_an_answer_acquits_of_failed_probes(is_complete: bool) -> None:
    """What failed probes took out is back with the next answer, complete or not, and pays no penalty."""
    table = make_table()
    for _ in range(3):
        table.observe_probe(A, Outcome.FAILURE, LATER)
    if is_complete:
        assert table.observe_outcome(A, Outcome.SUCCESS, LATER + 1)
    else:
        assert table.observe_probe(A, Outcome.FAILURE, LATER + 1, is_answering=True)
    assert is_well(table)


def test_probes_that_were_not_believed_do_not_help_a_failed_request() -> None:
    """A backend kept in service against its probes goes out by requests only if they alone suffice."""
    table = make_table()
    for _ in range(10):
        table.observe_probe(A, Outcome.FAILURE, LATER)
    assert not table.observe_outcome(A, Outcome.FAILURE, LATER)
    assert not table.observe_outcome(A, Outcome.FAILURE, LATER)
    assert table.observe_outcome(A, Outcome.FAILURE, LATER)
    assert table.standing(A) is Standing.FAILED_REQUESTS


# -- the way back after failed requests


def make_failed_table(**options: Any) -> HealthTable:
    """Requests took it out at second 10."""
    table = make_table(**options)
    observe(table, Outcome.FAILURE, 3, 10.0)
    assert table.standing(A) is Standing.FAILED_REQUESTS
    return table


def test_probes_alone_bring_back_nobody_whom_requests_took_out() -> None:
    """C04: good probes lead to a trial, three served requests end it; late ones from before count nothing."""
    table = make_failed_table()
    observe(table, Outcome.SUCCESS, 5, 10.5)
    assert table.observe_probe(A, Outcome.SUCCESS, 11.0)
    assert table.standing(A) is Standing.ON_TRIAL
    for _ in range(20):
        assert not table.observe_probe(A, Outcome.SUCCESS, 12.0)
    flips = [table.observe_outcome(A, Outcome.SUCCESS, 13.0) for _ in range(3)]
    assert (flips, is_well(table)) == ([False, False, True], True)


def test_one_failure_ends_a_trial_and_doubles_the_rest() -> None:
    """1 s, then 2 s, then 4 s: a broken engine with good probes is tried ever more rarely."""
    table = make_failed_table(min_down_s=1.0, max_down_s=4.0)
    now_s = 10.0
    for rest_s in (1.0, 2.0, 4.0, 4.0):
        assert not table.observe_probe(A, Outcome.SUCCESS, now_s + rest_s - 0.1)
        now_s += rest_s
        assert table.observe_probe(A, Outcome.SUCCESS, now_s)
        table.observe_outcome(A, Outcome.SUCCESS, now_s)
        assert table.observe_outcome(A, Outcome.FAILURE, now_s)
        assert table.standing(A) is Standing.FAILED_REQUESTS


def test_probes_that_fail_during_a_trial_end_it() -> None:
    """It needs another trial then."""
    table = make_failed_table()
    table.observe_probe(A, Outcome.SUCCESS, 11.0)
    for _ in range(3):
        table.observe_probe(A, Outcome.FAILURE, LATER)
    assert table.standing(A) is Standing.FAILED_REQUESTS


def test_a_new_process_needs_no_trial() -> None:
    """Nobody listened there: what listens now is another."""
    table = make_failed_table()
    for _ in range(3):
        table.observe_probe(A, Outcome.FAILURE, 11.0, is_refused=True)
    assert table.standing(A) is Standing.REFUSED
    table.observe_probe(A, Outcome.SUCCESS, 20.0)
    assert is_well(table)


# -- the share of failures


def serve(table: HealthTable, backend_id: BackendId, num_served: int, num_failed: int, now_s: float) -> None:
    """Failures never in a row."""
    for number in range(num_served):
        if number < num_failed:
            table.observe_outcome(backend_id, Outcome.FAILURE, now_s)
        table.observe_outcome(backend_id, Outcome.SUCCESS, now_s)


def make_two(**options: Any) -> HealthTable:
    table = make_table(**options)
    table.observe_probe(B, Outcome.SUCCESS, 0.0)
    return table


def test_an_engine_that_fails_a_quarter_is_found() -> None:
    """C04: any success clears a row of failures, not the share of them."""
    table = make_two()
    serve(table, A, 30, 10, 1.0)
    serve(table, B, 40, 0, 1.0)
    assert is_well(table)
    assert table.compare_share(A, (A, B), 2.0)
    assert table.standing(A) is Standing.FAILS_OFTEN
    assert not table.compare_share(A, (A, B), 2.0), "told once"
    table.observe_probe(A, Outcome.SUCCESS, 3.0)
    assert table.standing(A) is Standing.ON_TRIAL


def test_a_share_is_held_against_that_of_the_others() -> None:
    """When all fail alike the requests are to blame, or something behind all of them."""
    table = make_two()
    serve(table, A, 30, 10, 1.0)
    serve(table, B, 30, 8, 1.0)
    assert not table.compare_share(A, (A, B), 2.0)


@pytest.mark.parametrize(("num_served", "num_failed"), [(14, 5), (40, 4), (100, 9)])
def test_too_little_says_nothing(num_served: int, num_failed: int) -> None:
    """Too few requests, too few failures, or a share within the margin."""
    table = make_two()
    serve(table, A, num_served, num_failed, 1.0)
    assert table.failure_share(A, 1.0) is None
    assert not table.compare_share(A, (A, B), 1.0)


def test_shares_are_of_the_last_window() -> None:
    """Failures of two windows ago count nothing, those of the last one less and less."""
    table = make_two(failure_share_window_s=10.0)
    serve(table, A, 30, 10, 1.0)
    table.observe_probe(A, Outcome.SUCCESS, 10.5)
    serve(table, A, 20, 0, 10.5)
    share = table.failure_share(A, 11.0)
    assert share is not None
    assert 0.1 < share < 0.2
    assert table.failure_share(A, 19.0) is None
    table.observe_probe(A, Outcome.SUCCESS, 35.0)
    assert table.failure_share(A, 35.0) is None


def test_a_trial_that_was_passed_begins_a_new_count() -> None:
    """The failures that took it out do not take it out again."""
    table = make_two()
    serve(table, A, 30, 10, 1.0)
    table.compare_share(A, (B,), 2.0)
    table.observe_probe(A, Outcome.SUCCESS, 4.0)
    observe(table, Outcome.SUCCESS, 3, 4.0)
    assert is_well(table)
    assert table.failure_share(A, 4.0) is None
