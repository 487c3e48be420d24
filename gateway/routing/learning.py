"""What answers teach: how large texts are, how fast backends prefill, how much of a cache to trust.

The shadow of each backend has a capacity in bytes: its KV tokens, times the trust in it, over tokens per
byte. Trust falls where a backend held less than expected. It grows back slowly, at most to the configured
value. A backend that held next to nothing twice in a row has been emptied: by an operator, or by what others
sent. Then all that its shadow says is forgotten but what has just been computed there. Knows no load and no
clock.
"""

from __future__ import annotations

from gateway.routing.calibration import CostModel, TokenRatio
from gateway.routing.reservation import Reservation
from gateway.routing.settings import RoutingSettings
from gateway.routing.shadow import Shadow
from gateway.values import Api, Usage

_JUDGED_TOKENS = 512  # smaller expectations say too little about a cache
_COLD_SHARE = 0.1  # of what was expected; less is nothing but a shared beginning
_MAX_COLD = 2  # answers in a row


class Learner:
    """Corrects token ratios, costs and the shadow by what engines report."""

    def __init__(
        self, settings: RoutingSettings, shadow: Shadow, costs: CostModel, tokens: TokenRatio
    ) -> None:
        self.settings = settings
        self._shadow, self._costs, self._tokens = shadow, costs, tokens
        self._capacity_tokens: dict[int, int] = {}
        self.trust: dict[int, float] = {}  # by slot, at most 1
        self._num_cold: dict[int, int] = {}  # by slot: answers since one that found what was expected
        self._has_found: set[int] = set()  # slots that have found what was expected since they were emptied
        self.num_emptied: dict[int, int] = {}  # by slot: how often it turned out to be empty

    def open_slot(self, slot: int) -> None:
        """Start a backend that has just joined with the configured trust. Changes trust and costs."""
        self.trust[slot] = self.settings.shadow_trust
        self._num_cold[slot] = self.num_emptied[slot] = 0
        self._has_found.discard(slot)
        self._costs.open_slot(slot)

    def set_capacity(self, slot: int, capacity_tokens: int | None) -> None:
        """Set how many tokens a backend can hold; None if unknown. Changes the shadow."""
        self._capacity_tokens[slot] = capacity_tokens or self.settings.kv_capacity_tokens
        self._fit_shadow(slot)

    def learn(self, reservation: Reservation, usage: Usage) -> None:
        """Learn from one complete answer. Changes shadow, token ratios, costs and trust."""
        slot, facts = reservation.slot, reservation.facts
        if usage.completion_tokens:
            ratio = self._tokens.get(facts.model)
            self._shadow.add_answer(slot, reservation.chain, int(usage.completion_tokens / ratio))
        if usage.prompt_tokens is None:
            return
        if facts.api is not Api.RESPONSES:
            self._tokens.observe(facts.model, facts.num_prompt_bytes, usage.prompt_tokens)
        if usage.cached_tokens is None:
            return
        if reservation.expected_cached_tokens > _JUDGED_TOKENS:
            self._judge_shadow(slot, reservation.expected_cached_tokens, usage.cached_tokens)
            self._see_cold(reservation, usage.cached_tokens)
        if reservation.service_s is not None:
            uncached = usage.prompt_tokens - usage.cached_tokens
            self._costs.observe(slot, uncached, usage.cached_tokens, reservation.service_s)

    def _see_cold(self, reservation: Reservation, reported: int) -> None:
        """Forget what a backend held if it turns out to have been emptied. Changes the shadow."""
        slot = reservation.slot
        if reported >= _COLD_SHARE * reservation.expected_cached_tokens:
            self._num_cold[slot] = 0
            self._has_found.add(slot)
            return
        self._num_cold[slot] += 1
        if self._num_cold[slot] < _MAX_COLD or slot not in self._has_found:
            return  # one that has never found anything keeps no cache, or tells nothing of it
        self._num_cold[slot] = 0
        self._has_found.discard(slot)
        self.num_emptied[slot] += 1
        self._shadow.forget(slot)
        if reservation.chain:
            self._shadow.insert(slot, reservation.chain)

    def _judge_shadow(self, slot: int, expected: int, reported: int) -> None:
        """Trust less of the cache if it held less than expected, and slowly more otherwise."""
        trust = self.trust[slot]
        if reported < 0.5 * expected:
            trust = max(0.1, trust * 0.98)
        elif reported > 0.9 * expected:
            trust = min(self.settings.shadow_trust, trust * 1.002)
        if trust != self.trust[slot]:
            self.trust[slot] = trust
            self._fit_shadow(slot)

    def _fit_shadow(self, slot: int) -> None:
        self._shadow.set_capacity(
            slot, int(self._capacity_tokens[slot] * self.trust[slot] / self._tokens.mean)
        )
