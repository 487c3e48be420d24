"""What routing estimates: prefill cost, tokens per byte, load and traffic pressure, and its settings."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.calibration import CostModel, TokenRatio
from gateway.routing.load import LoadTable
from gateway.routing.settings import RoutingSettings
from gateway.routing.traffic import Traffic

SETTINGS = RoutingSettings(prefill_tokens_per_s=10_000.0, prefill_fixed_s=0.01)


def cost_model(count: int) -> CostModel:
    costs = CostModel(SETTINGS)
    for slot in range(count):
        costs.open_slot(slot)
    return costs


def true_cost(costs: CostModel, slot: int, uncached: float, cached: float, slowness: float) -> float:
    model = costs.models[slot]
    return model.fixed_s + slowness * model.default_s(uncached, cached)


@pytest.mark.parametrize("slowness", [0.05, 1.0, 40.0])
def test_prefill_cost_is_learned_whatever_the_default_says(slowness: float) -> None:
    """After 30 answers the predicted time of another prompt is within 5 % of the truth."""
    costs = cost_model(1)
    for number in range(30):
        uncached, cached = 100 + 37 * number, 500 * (number % 4)
        costs.observe(0, uncached, cached, true_cost(costs, 0, uncached, cached, slowness))
    truth = true_cost(costs, 0, 8000, 2000, slowness)
    assert costs.models[0].seconds(8000, 2000) == pytest.approx(truth, rel=0.05)


def test_a_backend_not_yet_measured_follows_the_fleet() -> None:
    """The first one measured must not look faster than the others, or it would get everything."""
    costs = cost_model(4)
    for _ in range(20):
        costs.observe(0, 1000, 0, true_cost(costs, 0, 1000, 0, 0.1))
    scales = [model.scale for model in costs.models]
    assert scales == [scales[0]] * 4
    assert scales[0] == pytest.approx(0.1, rel=0.06)


def test_clearly_different_hardware_is_told_apart() -> None:
    """A backend three times slower than the other gets its own cost, and back again when mended."""
    costs = cost_model(2)
    for _ in range(100):
        costs.observe(0, 1000, 0, true_cost(costs, 0, 1000, 0, 1.0))
        costs.observe(1, 1000, 0, true_cost(costs, 1, 1000, 0, 3.0))
    assert costs.models[1].scale > 1.5 * costs.models[0].scale
    for _ in range(400):
        costs.observe(0, 1000, 0, true_cost(costs, 0, 1000, 0, 1.0))
        costs.observe(1, 1000, 0, true_cost(costs, 1, 1000, 0, 1.0))
    assert costs.models[1].scale == pytest.approx(costs.models[0].scale, rel=0.05)


@given(st.lists(st.tuples(st.floats(-10, 1e6), st.floats(0, 1e6), st.floats(-1, 1e6)), max_size=40))
def test_cost_stays_finite_and_positive_whatever_is_observed(
    answers: list[tuple[float, float, float]],
) -> None:
    """Nonsense times and sizes never make a price negative, zero or infinite."""
    costs = cost_model(2)
    for number, (uncached, cached, taken_s) in enumerate(answers):
        costs.observe(number % 2, uncached, cached, taken_s)
        for model in costs.models:
            assert 0 < model.seconds(100, 100) < math.inf


def test_tokens_per_byte_are_learned_per_model_and_bounded() -> None:
    """Each model has its own ratio; an unknown one gets the mean; names from clients are bounded."""
    ratio = TokenRatio(SETTINGS.tokens_per_byte)
    for _ in range(50):
        ratio.observe("dense", 1000, 500)
        ratio.observe("sparse", 1000, 100)
    assert ratio.get("dense") == pytest.approx(0.5)
    assert ratio.get("sparse") == pytest.approx(0.1)
    assert 0.1 < ratio.get("other") < 0.5
    for number in range(1000):
        ratio.observe(f"model-{number}", 1000, 300)
    assert ratio.get("model-999") == ratio.mean
    ratio.observe("dense", 10, 9_999)
    assert ratio.get("dense") == pytest.approx(0.5), "tiny prompts say nothing"


def test_load_returns_to_exactly_zero() -> None:
    """Sums of floats drift; what is outstanding does not."""
    load = LoadTable(SETTINGS)
    load.open_slot(0)
    works = [0.1 * number + 1e-9 for number in range(50)]
    for work_s in works:
        load.count_sent(0, work_s)
    for work_s in reversed(works):
        load.count_answered(0, work_s, 5.0, 5.0)
        load.done(0)
    assert (load.wait[0], load.in_flight[0], load.unanswered[0]) == (0.0, 0, 0)


def test_recent_work_fades_and_survives_rebasing() -> None:
    """Recent work compares by age: after one window e times less, also over many windows."""
    load = LoadTable(SETTINGS)
    load.open_slot(0)
    load.open_slot(1)
    window_s = SETTINGS.recent_work_window_s
    for age in range(40):
        load.add_recent([(0, 1.0, 1.0, age * window_s)])
    load.add_recent([(1, 1.0, 1.0, 39 * window_s)])
    assert load.recent[0] / load.recent[1] == pytest.approx(1 / (1 - math.exp(-1)), rel=1e-6)


def test_load_put_there_by_others_counts_until_it_is_stale() -> None:
    """Scraped waiting requests beyond our own raise the wait; old scrapes are forgotten."""
    load = LoadTable(SETTINGS)
    load.open_slot(0)
    load.count_sent(0, 0.5)
    load.observe_foreign(0, num_running=2, num_waiting=4, mean_prefill_s=0.2, now_s=0.0)
    assert load.wait[0] == pytest.approx(0.5 + 3 * 0.2)
    assert load.foreign_requests[0] == 5
    load.expire_foreign(SETTINGS.load_stale_s + 0.1)
    assert load.wait[0] == pytest.approx(0.5)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 2.0 * SETTINGS.load_stale_s)), max_size=40))
def test_expiry_forgets_exactly_what_is_stale(reports: list[tuple[int, float]]) -> None:
    """Whatever is reported when: after each call only load seen within `load_stale_s` is left."""
    load, seen_s, now_s = LoadTable(SETTINGS), dict[int, float](), 0.0
    for slot in range(4):
        load.open_slot(slot)
    for slot, later_s in reports:
        now_s += later_s
        load.take_foreign(slot, 1.0, 2, now_s)
        load.expire_foreign(now_s)
        seen_s[slot] = now_s
        fresh = [at_s + SETTINGS.load_stale_s >= now_s for at_s in seen_s.values()]
        assert sum(load.foreign_requests) == 2 * sum(fresh)
        assert sum(load.wait) == sum(fresh)


def test_service_time_is_the_gap_between_prefills() -> None:
    """A queued prefill began when the one before it ended; under foreign load nothing is known."""
    load = LoadTable(SETTINGS)
    load.open_slot(0)
    for _ in range(4):
        load.count_sent(0, 1.0)
    assert load.count_answered(0, 1.0, 10.0, 12.0) == 2.0
    assert load.count_answered(0, 1.0, 10.5, 13.0) == 1.0
    assert load.count_answered(0, 1.0, 20.0, 20.5) == 0.5
    load.observe_foreign(0, num_running=0, num_waiting=9, mean_prefill_s=1.0, now_s=21.0)
    assert load.count_answered(0, 1.0, 21.0, 25.0) is None


def test_pressure_grows_with_rate_and_utilisation_and_stays_finite() -> None:
    """More arrivals and more work make each second dearer; an overloaded fleet has a finite price."""
    found = []
    for work_s in (0.01, 0.5, 50.0):
        traffic = Traffic(SETTINGS)
        for number in range(1000):
            traffic.add_many([(number * 0.5, work_s, 1000, 0)])
        found.append(traffic.pressure(500.0, 1))
    assert found == sorted(found)
    assert 1.5 < found[0] < 3.0, "two requests per second"
    assert found[-1] < 100.0


def test_pressure_fades_when_traffic_stops_and_counts_regret() -> None:
    """An idle hour makes placement free again; tokens that had to be written twice cost more."""
    traffic = Traffic(SETTINGS)
    for number in range(100):
        traffic.add_many([(float(number), 0.1, 1000, 500)])
    assert traffic.regret == pytest.approx(1.0)
    assert traffic.pressure(100.0, 4) > 20 * traffic.pressure(3700.0, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "magic"},
        {"virtual_nodes": 0},
        {"load_bound": 0.9},
        {"placement_bound": float("nan")},
        {"stay_gain": -0.1},
        {"slow_start_floor": 1.5},
        {"prefill_tokens_per_s": float("inf")},
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    """Every bad option fails at once with a text that names it."""
    with pytest.raises(ValueError, match=next(iter(options)).split("_")[0]):
        RoutingSettings(**options)  # type: ignore[arg-type] # wrong on purpose
