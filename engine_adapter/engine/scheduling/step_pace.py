"""How many prompt tokens a step may compute so that it ends in time.

An abort, a newcomer and every running stream wait for the step under way. How long a prompt token takes
depends on model, machine, context and neighbours, so it is not configured but followed: after each step the
limit moves half way to what would have taken the allowed time. Beside decodes, whose streams pause meanwhile,
half the time is allowed; the two limits are kept apart because a step's fixed cost weighs differently.

Invariant: a limit is never below `MIN_PROMPT_TOKENS`, so prompts advance on any machine. Knows no clock.
"""

from __future__ import annotations

MIN_PROMPT_TOKENS = 64  # also of the first step; below it most of a step is fixed cost, on a CPU above all
MAX_GROWTH = 2.0  # of a limit per step: one lucky measurement must not bring a very long step


class StepPace:
    """Limits of prompt tokens per step; without an allowed time, none."""

    def __init__(self, max_step_s: float | None) -> None:
        self._max_step_s = max_step_s
        self._limits = {False: float(MIN_PROMPT_TOKENS), True: float(MIN_PROMPT_TOKENS)}

    def cap(self, num_tokens: int, *, has_decodes: bool) -> int:
        """Return how many of so many prompt tokens the next step may take. Changes nothing."""
        if self._max_step_s is None:
            return num_tokens
        return min(num_tokens, int(self._limits[has_decodes]))

    def record(self, num_prompt_tokens: int, elapsed_s: float, *, has_decodes: bool) -> None:
        """Learn from a step. Changes: one limit, unless the step was too small to tell."""
        limit = self._limits[has_decodes]
        if self._max_step_s is None or num_prompt_tokens < limit / 2:
            return
        allowed_s = self._max_step_s / 2 if has_decodes else self._max_step_s
        ratio = min(allowed_s / elapsed_s, MAX_GROWTH) if elapsed_s > 0 else MAX_GROWTH
        self._limits[has_decodes] = max((limit + num_prompt_tokens * ratio) / 2, MIN_PROMPT_TOKENS)
