"""What a token costs: prefill seconds per backend and tokens per byte per model, learned from answers.

A prefill of u uncached tokens behind c cached ones costs (traces study, section 2):

    seconds = fixed + a · u · (1 + q · (c + u / 2))

q is the attention over the context. It depends on the shape of the model and stays as configured; a wrong
value costs little (the study: at most a third of mean TTFT if halved, doubled or dropped). a is fitted per
backend as a ratio of sums that fade: the seconds that prefills took over the seconds that they should have
taken. A mean of ratios would not do: answers come in batches, where one seems slow and the next takes no
time, and short prompts would dominate. A noisy a is worse than a wrong one, because a backend believed to be
fast is flooded.

A backend counts as fast as the mean of the fleet until it clearly differs, and all backends take over a new
mean at once. Otherwise the backend that is measured first would look faster than those still at a pessimistic
default, would get all new sessions, and the others would never be measured.

Invariant: a stays positive, between 1/1000 and 1000 times its default, whatever is observed. There is no
clock and no queue here: callers say how long the prefill itself took.
"""

from __future__ import annotations

from gateway.routing.settings import RoutingSettings

_FORGET = 0.98  # weight of the past per answer of one backend: about 50 are remembered
_FLEET_FORGET = 0.99  # the same for the fleet as a whole
_PRIOR_ANSWERS = 10.0  # "as fast as the mean" weighs as much as this many of a backend's own answers
_ALIKE = 1.25  # backends within this factor of the mean are noise, not different hardware
_SPREAD = 0.05  # all backends take over a new mean when it has changed by this share
_BYTES_FORGET = 0.95


class PrefillModel:
    """Prefill cost of one backend. `scale` is how many times slower it is than the configured default."""

    __slots__ = (
        "_attention",
        "_default_s_per_token",
        "fixed_s",
        "num_answers",
        "predicted_s",
        "s_attention",
        "s_per_token",
        "scale",
        "taken_s",
    )

    def __init__(self, settings: RoutingSettings) -> None:
        self.fixed_s = settings.prefill_fixed_s
        self._default_s_per_token = 1.0 / settings.prefill_tokens_per_s
        self._attention = settings.attention_per_token
        self.predicted_s = self.taken_s = self.num_answers = 0.0
        self.set_scale(1.0)

    def set_scale(self, scale: float) -> None:
        """Use a new estimate of the speed. Changes the cost."""
        self.scale = min(1000.0, max(0.001, scale))
        self.s_per_token = self._default_s_per_token * self.scale
        self.s_attention = self.s_per_token * self._attention

    def seconds(self, uncached_tokens: float, cached_tokens: float) -> float:
        """Return the prefill time of `uncached_tokens` behind `cached_tokens` on an idle backend."""
        return self.fixed_s + uncached_tokens * (
            self.s_per_token + self.s_attention * (cached_tokens + 0.5 * uncached_tokens)
        )

    def default_s(self, uncached_tokens: float, cached_tokens: float) -> float:
        """Return the time for the tokens alone at the configured default speed."""
        context = cached_tokens + 0.5 * uncached_tokens
        return uncached_tokens * self._default_s_per_token * (1.0 + self._attention * context)


class CostModel:
    """The prefill costs of all backends, by slot, learned together."""

    __slots__ = ("_expected_s", "_settings", "_taken_s", "fleet_scale", "models")

    def __init__(self, settings: RoutingSettings) -> None:
        self._settings = settings
        self._expected_s = self._taken_s = 0.0
        self.fleet_scale = 1.0  # the mean that all backends took over last
        self.models: list[PrefillModel] = []

    def open_slot(self, slot: int) -> None:
        """Start a backend at the fleet's mean. Changes the model."""
        while len(self.models) <= slot:
            self.models.append(PrefillModel(self._settings))
        self.models[slot] = PrefillModel(self._settings)
        self.models[slot].set_scale(self.fleet_scale)

    def observe(self, slot: int, uncached_tokens: float, cached_tokens: float, taken_s: float) -> None:
        """Learn from one answer whose prefill took `taken_s`. Changes the model."""
        model = self.models[slot]
        expected_s = model.default_s(uncached_tokens, cached_tokens)
        if expected_s <= 0:
            return
        taken_s = max(0.0, taken_s - model.fixed_s)
        self._expected_s = self._expected_s * _FLEET_FORGET + expected_s
        self._taken_s = self._taken_s * _FLEET_FORGET + taken_s
        mean = max(0.001, self._taken_s / self._expected_s)
        model.predicted_s = model.predicted_s * _FORGET + expected_s * mean
        model.taken_s = model.taken_s * _FORGET + taken_s
        model.num_answers = model.num_answers * _FORGET + 1.0
        if abs(mean - self.fleet_scale) > _SPREAD * self.fleet_scale:
            self.fleet_scale = mean
            for backend_model in self.models:
                backend_model.set_scale(mean * _ratio(backend_model))
            return
        scale = self.fleet_scale * _ratio(model)
        if scale != model.scale:
            model.set_scale(scale)


def _ratio(model: PrefillModel) -> float:
    """Return how many times slower than the fleet's mean this backend is; 1 unless it clearly differs."""
    if not model.num_answers:
        return 1.0
    prior_s = _PRIOR_ANSWERS * model.predicted_s / model.num_answers
    ratio = (model.taken_s + prior_s) / (model.predicted_s + prior_s) if model.predicted_s else 1.0
    return 1.0 if 1.0 / _ALIKE < ratio < _ALIKE else ratio


class TokenRatio:
    """Tokens per byte of text (or per other unit) and model; the mean of all models for an unknown one."""

    __slots__ = ("_by_model", "_highest", "_least", "mean")

    def __init__(self, mean: float, *, highest: float = 2.0, least: int = 64) -> None:
        """`mean` holds until engines have reported usage. Amounts below `least` teach nothing."""
        self.mean, self._highest, self._least = mean, highest, least
        self._by_model: dict[str | None, float] = {}

    def get(self, model: str | None) -> float:
        return self._by_model.get(model, self.mean)

    def observe(self, model: str | None, num_bytes: int, num_tokens: int) -> None:
        """Learn from one usage report. Changes the ratio."""
        if num_bytes < self._least or num_tokens <= 0:
            return
        ratio = min(self._highest, max(0.01, num_tokens / num_bytes))
        known = self._by_model.get(model)
        if known is None and len(self._by_model) >= 256:
            return  # model names come from clients: bounded
        self._by_model[model] = (
            ratio if known is None else known * _BYTES_FORGET + ratio * (1 - _BYTES_FORGET)
        )
        self.mean = self.mean * _BYTES_FORGET + ratio * (1 - _BYTES_FORGET)
