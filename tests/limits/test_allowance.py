"""The rule of a tenant's limits, and how it is told."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.limits.allowance import (
    Allowance,
    TenantUse,
    estimated_tokens,
    format_duration,
    limit_headers,
    refusal,
)
from gateway.limits.settings import TenantLimits
from gateway.values import Api, RequestFacts


def test_a_minutes_worth_may_come_at_once_and_then_the_rate_holds() -> None:
    """60 a minute: 60 pass at once, the next after a second."""
    limits, use = TenantLimits(requests_per_minute=60), TenantUse(0.0)
    answers = [use.draw(limits, 0, 0, 0.0) for _ in range(61)]
    assert [one.refused_for for one in answers] == [None] * 60 + ["tenant_requests"]
    assert answers[-1].retry_after_s == pytest.approx(1.0)
    assert use.draw(limits, 0, 0, 0.9).refused_for == "tenant_requests"
    assert use.draw(limits, 0, 0, 1.0).refused_for is None


def test_a_refused_request_costs_nothing() -> None:
    """Enough in one bucket and not in the other takes from neither."""
    limits, use = TenantLimits(requests_per_minute=10, tokens_per_minute=100), TenantUse(0.0)
    assert use.draw(limits, 90, 0, 0.0).refused_for is None
    refused = use.draw(limits, 50, 0, 0.0)
    assert (refused.refused_for, refused.requests_left, refused.tokens_left) == ("tenant_tokens", 9.0, 10.0)
    assert refused.retry_after_s == pytest.approx(24.0)
    assert use.draw(limits, 10, 0, 0.0).refused_for is None


def test_real_use_corrects_the_estimate_even_below_zero() -> None:
    """A long answer leaves a debt, which time pays; a short one gives back."""
    limits, use = TenantLimits(tokens_per_minute=60), TenantUse(0.0)
    assert use.draw(limits, 10, 0, 0.0).refused_for is None
    use.correct(limits, 80, 0.0)
    refused = use.draw(limits, 1, 0, 0.0)
    assert (refused.refused_for, refused.tokens_left) == ("tenant_tokens", -30.0)
    assert refused.retry_after_s == pytest.approx(31.0)
    assert use.draw(limits, 1, 0, 31.0).refused_for is None
    use.correct(limits, -1000, 31.0)
    assert use.draw(limits, 60, 0, 31.0).refused_for is None


def test_a_request_larger_than_the_bucket_passes_when_it_is_full() -> None:
    """It could never pass otherwise; its debt is paid before the next."""
    limits, use = TenantLimits(tokens_per_minute=100), TenantUse(0.0)
    assert use.draw(limits, 1000, 0, 0.0).refused_for is None
    assert use.draw(limits, 1, 0, 0.0).retry_after_s == pytest.approx(541 * 0.6 / 0.6, rel=0.01)


def test_what_spends_no_tokens_is_not_held_up_by_an_empty_bucket() -> None:
    """It counts as a request all the same."""
    limits, use = TenantLimits(tokens_per_minute=100, requests_per_minute=2), TenantUse(0.0)
    assert use.draw(limits, 1000, 0, 0.0).refused_for is None
    assert use.draw(limits, 0, 0, 0.0).refused_for is None
    assert use.draw(limits, 0, 0, 0.0).refused_for == "tenant_requests"


def test_requests_in_flight_are_bounded() -> None:
    """The count is of the others, and needs no bucket."""
    limits, use = TenantLimits(max_in_flight=2), TenantUse(0.0)
    assert use.draw(limits, 5, 1, 0.0).refused_for is None
    assert use.draw(limits, 5, 2, 0.0).refused_for == "tenant_in_flight"


def test_levels_of_all_replicas_are_gone_on_from() -> None:
    """After contact with the others is lost nobody starts with a full bucket again."""
    limits, use = TenantLimits(requests_per_minute=60), TenantUse(0.0)
    use.adopt(Allowance(requests_left=1.0, tokens_left=math.inf), 10.0)
    assert use.draw(limits, 0, 0, 10.0).refused_for is None
    assert use.draw(limits, 0, 0, 10.0).refused_for == "tenant_requests"


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 200), st.integers(-50, 50)), max_size=60))
def test_nobody_gets_more_than_the_bucket_and_the_rate(steps: list[tuple[float, int, int]]) -> None:
    """In any time span: granted requests at most a bucket plus the refill, levels at most a full bucket."""
    limits, use = TenantLimits(requests_per_minute=20, tokens_per_minute=100), TenantUse(0.0)
    now_s, granted = 0.0, 0
    for gap_s, tokens, more in steps:
        now_s += gap_s
        answer = use.draw(limits, tokens, 0, now_s)
        granted += answer.refused_for is None
        assert answer.requests_left <= 20
        assert answer.tokens_left <= 100
        assert (answer.refused_for is None) == (answer.retry_after_s == 0.0)
        if answer.refused_for is not None:  # what it says about coming again is true
            again = TenantUse(now_s)
            again.adopt(answer, now_s)
            assert again.draw(limits, tokens, 0, now_s + answer.retry_after_s + 1e-6).refused_for in (
                None,
                "tenant_tokens",
            )
        use.correct(limits, more, now_s)
    assert granted <= 20 + now_s * 20 / 60 + 1e-6


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0125, "13ms"), (1.0, "1s"), (7.5, "7.5s"), (60.0, "1m0s"), (3661.25, "61m1.25s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    """SDK users parse these."""
    assert format_duration(seconds) == text


def test_headers_speak_of_the_limits_that_there_are() -> None:
    """A limit that does not exist has no header; a debt shows as nothing left."""
    told = Allowance(requests_left=2.9, tokens_left=-30.0)
    both = TenantLimits(requests_per_minute=60, tokens_per_minute=600)
    assert dict(limit_headers(both, told)) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "57.1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m3s",
    }
    assert limit_headers(TenantLimits(max_in_flight=1), told) == []


def test_a_refusal_names_the_limit_and_the_time() -> None:
    """The message says what happened and what to do."""
    limits = TenantLimits(requests_per_minute=60)
    error = refusal(limits, Allowance(refused_for="tenant_requests", retry_after_s=0.5))
    assert error.message == "Rate limit reached: 60 requests per minute. Please try again in 500ms."
    assert error.retry_after_s == 0.5


def test_the_estimate_grows_with_the_prompt() -> None:
    """Four bytes are about a token."""
    assert estimated_tokens(RequestFacts(api=Api.CHAT, num_prompt_bytes=400)) == 100
    assert estimated_tokens(RequestFacts(api=Api.CHAT, num_prompt_bytes=0)) == 1
