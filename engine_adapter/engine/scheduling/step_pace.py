"""How many prompt tokens a step may compute so that it ends in time.

Aborts, new requests and every running stream wait for the current step. The time per prompt token depends on
model, machine, context and load, so it is measured, not configured: after each step the limit moves half way
to the number of tokens that would have taken the allowed time. Beside decodes, whose streams wait, half the
time is allowed. The two limits are separate because the fixed cost of a step weighs differently in them.

Invariant: a limit is never below `MIN_PROMPT_TOKENS`, so prompts advance on any machine. It reads no clock.
"""

from __future__ import annotations

MIN_PROMPT_TOKENS = 64  # also in the first step; below it, most of a step is fixed cost, especially on a CPU
MAX_GROWTH = 2.0  # of a limit per step: one fast step must not lead to a very long one


class StepPace:
    """Limits of prompt tokens per step; none without a time limit."""

    def __init__(self, max_step_s: float | None) -> None:
        self._max_step_s = max_step_s
        self._limits = {False: float(MIN_PROMPT_TOKENS), True: float(MIN_PROMPT_TOKENS)}

    def cap(self, num_tokens: int, *, has_decodes: bool) -> int:
        """Return how many of `num_tokens` prompt tokens the next step may take. Changes nothing."""
        if self._max_step_s is None:
            return num_tokens
        return min(num_tokens, int(self._limits[has_decodes]))

    def record(self, num_prompt_tokens: int, elapsed_s: float, *, has_decodes: bool) -> None:
        """Record a step. Changes: one limit, unless the step was too small to measure by."""
        limit = self._limits[has_decodes]
        if self._max_step_s is None or num_prompt_tokens < limit / 2:
            return
        allowed_s = self._max_step_s / 2 if has_decodes else self._max_step_s
        ratio = min(allowed_s / elapsed_s, MAX_GROWTH) if elapsed_s > 0 else MAX_GROWTH
        self._limits[has_decodes] = max((limit + num_prompt_tokens * ratio) / 2, MIN_PROMPT_TOKENS)
