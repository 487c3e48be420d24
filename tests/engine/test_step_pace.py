"""Steps that end in time on a simulated machine, whose clock is a formula."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine_adapter.engine.scheduling.step_pace import MIN_PROMPT_TOKENS, StepPace


def run_steps(
    pace: StepPace, num_steps: int, *, fixed_s: float, token_s: float, has_decodes: bool = False
) -> list[float]:
    """Work off an endless prompt; returns how long each step took."""
    durations = []
    for _ in range(num_steps):
        num_tokens = pace.cap(512, has_decodes=has_decodes)
        durations.append(fixed_s + num_tokens * token_s)
        pace.record(num_tokens, durations[-1], has_decodes=has_decodes)
    return durations


def test_steps_take_the_allowed_time() -> None:
    """From the sixth step on they take 0.5 s within a tenth, and 0.25 s beside decodes."""
    pace = StepPace(0.5)
    assert all(0.45 < step < 0.55 for step in run_steps(pace, 20, fixed_s=0.05, token_s=0.003)[6:])
    beside = run_steps(pace, 20, fixed_s=0.08, token_s=0.003, has_decodes=True)[6:]
    assert all(0.22 < step < 0.28 for step in beside)
    assert 0.45 < run_steps(pace, 1, fixed_s=0.05, token_s=0.003)[0] < 0.55  # the other limit is kept


def test_the_first_step_is_small_and_growth_is_gradual() -> None:
    """A cold start risks one small step, and no step takes more than twice the tokens of the one before."""
    pace = StepPace(10.0)
    assert pace.cap(512, has_decodes=False) == MIN_PROMPT_TOKENS
    durations = run_steps(pace, 12, fixed_s=0.0, token_s=0.001)
    assert all(after <= 2 * before for before, after in itertools.pairwise(durations))
    assert durations[-1] == 0.512  # all that was asked for


def test_a_machine_that_slows_down_is_followed() -> None:
    """When a token takes four times as long, the steps are back within the allowed time after a few."""
    pace = StepPace(0.5)
    run_steps(pace, 10, fixed_s=0.05, token_s=0.001)
    durations = run_steps(pace, 8, fixed_s=0.05, token_s=0.004)
    assert durations[0] > 1.0
    assert durations[-1] < 0.55


def test_small_steps_teach_nothing() -> None:
    """The fixed cost of a step with a few tokens says nothing about a large one."""
    pace = StepPace(0.5)
    pace.record(3, 0.4, has_decodes=False)
    assert pace.cap(512, has_decodes=False) == MIN_PROMPT_TOKENS


def test_without_an_allowed_time_nothing_is_cut() -> None:
    """The limit is off."""
    pace = StepPace(None)
    pace.record(512, 100.0, has_decodes=False)
    assert pace.cap(512, has_decodes=False) == 512


@given(
    steps=st.lists(st.tuples(st.integers(1, 2048), st.floats(0, 100), st.booleans())),
    wanted=st.integers(1, 2048),
)
def test_prompts_always_advance(steps: list[tuple[int, float, bool]], wanted: int) -> None:
    """Whatever was measured, a step may take what is left of a prompt or at least a minimum."""
    pace = StepPace(0.1)
    for num_tokens, elapsed_s, has_decodes in steps:
        pace.record(num_tokens, elapsed_s, has_decodes=has_decodes)
    for has_decodes in (False, True):
        assert min(wanted, MIN_PROMPT_TOKENS) <= pace.cap(wanted, has_decodes=has_decodes) <= wanted
