"""Decides whether to load or to recompute, by what this process has measured to be faster.

A tier that is slower than the processor makes every hit a loss. Rates are moving averages: bytes per second
of each tier, and prompt tokens per second of the model. A tier that has not been measured yet is used, so
that it gets measured. A tier that was too slow is tried again after RETRY_AFTER refusals, because a disk that
was busy may be idle now. It reads no clock: durations are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine_adapter.engine.kv.tiers.tier_block import Tier

WEIGHT = 0.3  # of the newest measurement in the average
RETRY_AFTER = 16
MIN_PREFILL_TOKENS = 32  # a step with fewer measures its fixed cost rather than the rate


class LoadPlanner:
    """The measured rates of one process."""

    def __init__(self) -> None:
        self.num_refusals = 0
        self.prefill_tokens_per_s: float | None = None
        self.read_bytes_per_s: dict[Tier, float] = {}

    def observe_prefill(self, num_tokens: int, duration_s: float) -> None:
        """Record a step that computed prompt tokens."""
        if num_tokens >= MIN_PREFILL_TOKENS and duration_s > 0:
            self.prefill_tokens_per_s = _mixed(self.prefill_tokens_per_s, num_tokens / duration_s)

    def observe_read(self, tier: Tier, num_bytes: int, duration_s: float) -> None:
        """Record a read from a tier."""
        if num_bytes and duration_s > 0:
            self.read_bytes_per_s[tier] = _mixed(self.read_bytes_per_s.get(tier), num_bytes / duration_s)

    def observe_timeout(self, tier: Tier, num_bytes: int, waited_s: float) -> None:
        """Record a load that did not arrive: the tier counts as that slow until it is measured again."""
        self.read_bytes_per_s[tier] = num_bytes / max(waited_s, 1e-3)

    def pays(self, num_tokens: int, bytes_of_tier: Mapping[Tier, int]) -> bool:
        """Return whether loading these bytes is faster than computing the tokens they stand for.

        Changes: the count of refusals; after RETRY_AFTER of them the answer is True once.
        """
        if self.prefill_tokens_per_s is None:
            return True
        load_s = sum(
            num_bytes / self.read_bytes_per_s[tier]
            for tier, num_bytes in bytes_of_tier.items()
            if tier in self.read_bytes_per_s
        )
        if load_s < num_tokens / self.prefill_tokens_per_s:
            return True
        self.num_refusals += 1
        return self.num_refusals % RETRY_AFTER == 0


def _mixed(average: float | None, newest: float) -> float:
    return newest if average is None else (1 - WEIGHT) * average + WEIGHT * newest
