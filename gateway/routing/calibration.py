"""What a token costs: prefill seconds per backend and tokens per byte per model, learned from answers.

The cost of a prefill of u uncached tokens behind c cached ones (traces study, section 2):

    seconds = fixed + a * u + b * u * (c + u / 2)

The second term is attention over the context. Both factors are fitted per backend by least squares
with forgetting on *relative* errors (otherwise the few longest prompts decide alone), with the
configured defaults as a prior that a few dozen answers outweigh.

Invariant: both factors stay positive and within 1/1000 and 1000 × of their defaults, whatever is
observed. It knows no clock and no queue: callers subtract the time that a request waited.
"""

from __future__ import annotations

from gateway.routing.settings import RoutingSettings

_FORGET = 0.98  # weight of the past per observation: about 50 answers are remembered
_PRIOR_WEIGHT = 2.0  # the defaults count as this many observations
_BYTES_FORGET = 0.95


class PrefillModel:
    """Prefill cost of one backend."""

    __slots__ = (
        "_b_per_token",
        "_default_s_per_token",
        "_ratio",
        "_sum_xx",
        "_sum_xy",
        "fixed_s",
        "s_per_token",
    )

    def __init__(self, settings: RoutingSettings) -> None:
        self.fixed_s = settings.prefill_fixed_s
        self._default_s_per_token = 1.0 / settings.prefill_tokens_per_s
        self.s_per_token = self._default_s_per_token
        self._ratio = settings.attention_per_token
        self._b_per_token = self.s_per_token * self._ratio
        self._sum_xx = _PRIOR_WEIGHT
        self._sum_xy = _PRIOR_WEIGHT

    def seconds(self, uncached_tokens: float, cached_tokens: float) -> float:
        """Return the prefill time of `uncached_tokens` behind `cached_tokens` on the idle backend."""
        return self.fixed_s + uncached_tokens * (
            self.s_per_token + self._b_per_token * (cached_tokens + 0.5 * uncached_tokens)
        )

    def observe(self, uncached_tokens: float, cached_tokens: float, elapsed_s: float) -> None:
        """Learn from one answer: the prefill alone took `elapsed_s`. Changes the factors."""
        work = uncached_tokens * (1.0 + self._ratio * (cached_tokens + 0.5 * uncached_tokens))
        if work <= 0:
            return
        expected_s = work * self._default_s_per_token
        scale = min(1000.0, max(0.001, (elapsed_s - self.fixed_s) / expected_s))
        self._sum_xx = self._sum_xx * _FORGET + 1.0
        self._sum_xy = self._sum_xy * _FORGET + scale
        self.s_per_token = self._default_s_per_token * self._sum_xy / self._sum_xx
        self._b_per_token = self.s_per_token * self._ratio


class TokenRatio:
    """Tokens per byte of prompt text, per model; the mean of all models for an unknown one."""

    __slots__ = ("_by_model", "mean")

    def __init__(self, settings: RoutingSettings) -> None:
        self.mean = settings.tokens_per_byte
        self._by_model: dict[str | None, float] = {}

    def get(self, model: str | None) -> float:
        return self._by_model.get(model, self.mean)

    def observe(self, model: str | None, num_bytes: int, num_tokens: int) -> None:
        """Learn from one usage report. Changes the ratio. Texts below 64 bytes say nothing."""
        if num_bytes < 64 or num_tokens <= 0:
            return
        ratio = min(2.0, max(0.01, num_tokens / num_bytes))
        known = self._by_model.get(model)
        if known is None and len(self._by_model) >= 256:
            return  # model names come from clients: bounded
        self._by_model[model] = (
            ratio if known is None else known * _BYTES_FORGET + ratio * (1 - _BYTES_FORGET)
        )
        self.mean = self.mean * _BYTES_FORGET + ratio * (1 - _BYTES_FORGET)
