"""Counting, adding up and forgetting: `gateway.observability.series`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.observability.metrics import GatewayMetrics, status_label
from gateway.observability.series import Counter, Gauge, Histogram

BOUNDS = (0.1, 1.0, 10.0)


def test_reading_a_counter_makes_no_series() -> None:
    """What was never counted is 0, and asking does not put it on the page."""
    counter = Counter("homing_x", "text", "backend")
    assert counter["b0"] == 0.0
    assert not counter
    counter["b0"] += 2
    assert counter == {"b0": 2.0}


def test_sums_over_the_first_label() -> None:
    """The other labels are added up."""
    counter = Counter("homing_x", "text", "affinity", "key_source")
    counter["hit", "header"] += 2
    counter["hit", "body"] += 1
    counter["new", "body"] += 1
    assert counter.by_label() == {"hit": 3.0, "new": 1.0}


@given(st.lists(st.floats(min_value=0, max_value=100)))
def test_every_observation_is_in_one_bucket(values: list[float]) -> None:
    """A bucket takes what is at most its bound and more than the one before; the sum is the sum."""
    histogram = Histogram("homing_x", "text", bounds=BOUNDS)
    for value in values:
        histogram.observe(value)
    row = histogram.get((), [0.0] * 5)
    for place, (low, high) in enumerate(zip((-1.0, *BOUNDS), (*BOUNDS, 1e9), strict=True)):
        assert row[place] == sum(low < value <= high for value in values)
    assert row[-1] == pytest.approx(sum(values))


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 9).map(float)), max_size=4))
def test_counters_add_up_over_processes(parts: list[dict[str | tuple[str, ...], float]]) -> None:
    """The whole is the sum of its parts, label by label, and merging leaves each part as it was."""
    own = Counter("homing_x", "text", "label")
    own["a"] += 5
    whole = own.merged(parts)
    for label in "abc":
        assert whole[label] == own[label] + sum(part.get(label, 0.0) for part in parts)
    assert own == {"a": 5.0}


def test_gauges_add_up_or_take_the_largest() -> None:
    """In-flight requests add up; a version or a lag is the largest of all."""
    summed, largest = Gauge("homing_x", "text", is_summed=True), Gauge("homing_y", "text")
    summed[()], largest[()] = 2.0, 2.0
    assert summed.merged([{(): 3.0}])[()] == 5.0
    assert largest.merged([{(): 3.0}, {(): 1.0}])[()] == 3.0


def test_histograms_add_up_by_bucket() -> None:
    """Counts and sums are added place by place."""
    histogram = Histogram("homing_x", "text", "api", bounds=BOUNDS)
    histogram.observe(0.5, "chat")
    whole = histogram.merged([{"chat": [1.0, 0.0, 0.0, 2.0, 90.0], "other": [0.0, 0.0, 1.0, 0.0, 5.0]}])
    assert whole["chat"] == [1.0, 1.0, 0.0, 2.0, 90.5]
    assert whole["other"] == [0.0, 0.0, 1.0, 0.0, 5.0]
    assert histogram["chat"] == [0.0, 1.0, 0.0, 0.0, 0.5]


def test_backends_that_left_are_forgotten() -> None:
    """A fleet whose backends come and go under new names does not grow the page for ever."""
    metrics = GatewayMetrics()
    for number in range(100):
        metrics.keep_backends({f"b{number}", "stays"})
        metrics.prompt_tokens[f"b{number}"] += 1
        metrics.upstream_errors[f"b{number}", "upstream_reset"] += 1
        metrics.prompt_tokens["stays"] += 1
    assert metrics.prompt_tokens == {"b99": 1.0, "stays": 100.0}
    assert set(metrics.upstream_errors) == {("b99", "upstream_reset")}


def test_status_labels_are_bounded() -> None:
    """A backend may answer with any three digits; only HTTP's own become labels."""
    assert {status_label(status) for status in range(600, 1000)} == {"other"}
    assert status_label(499) == "499"
