"""Which failures another backend may cure, and how many retries a sick fleet is spared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import errors
from gateway.routing.failover import FailoverSettings, RetryBudget, may_try_another


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.UpstreamConnectFailed("refused"), True),
        (errors.UpstreamReset("reset"), True),
        (errors.UpstreamTimeout("slow"), True),
        (errors.UpstreamUnavailable("503"), True),
        (errors.UpstreamTruncated("cut"), True),
        (errors.BadRequest("no"), False),
        (errors.NoBackend("none"), False),
    ],
)
def test_only_failures_of_a_backend_before_its_answer_are_retried(
    error: errors.GatewayError, expected: bool
) -> None:
    """Connect errors, resets and 5xx move on; a cut answer and the client's own errors do not."""
    assert may_try_another(error, num_attempts=1, settings=FailoverSettings()) is expected


def test_attempts_are_capped() -> None:
    """The cap counts attempts, the first included."""
    error = errors.UpstreamReset("reset")
    settings = FailoverSettings(max_attempts=2)
    assert may_try_another(error, num_attempts=1, settings=settings)
    assert not may_try_another(error, num_attempts=2, settings=settings)


@given(st.lists(st.booleans(), max_size=500))
def test_retries_stay_within_their_share(events: list[bool]) -> None:
    """Never more retries than the burst allowance plus the ratio of requests seen."""
    settings = FailoverSettings(budget_ratio=0.2, budget_min=5)
    budget = RetryBudget(settings)
    num_requests = num_retries = 0
    for is_request in events:
        if is_request:
            num_requests += 1
            budget.deposit()
        elif budget.withdraw():
            num_retries += 1
        assert num_retries <= 5 + 0.2 * num_requests + 1e-9
