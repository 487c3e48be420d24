"""Whether a bound session stays at home, told without a look at any other backend.

Most requests are the next turn of a session whose home is free. Such a session stays whatever the others
would cost, because a session never moves to save less than `stay_margin_s`:

    its price at home is within the margin, or
    its queue at home is within the margin, and home holds at least half of its prompt

So the pool, its tiers and shares, and who else holds the prompt do not matter. `HomeTest` answers with the
very decision that the whole way (`Router.decide_fully`) would give, or with None. `HomingPolicy` uses the
same price and the same rule, so there is one of each.

Cost: O(1) in backends and messages. Testing changes nothing.
"""

from __future__ import annotations

from gateway.routing.calibration import TokenRatio
from gateway.routing.placement_request import RoutingState, measure_prompt
from gateway.routing.selection import find_home, num_choices
from gateway.routing.shadow import Chain
from gateway.values import Affinity, BackendId, Binding, Candidate, Decision, RequestFacts

Priced = tuple[float, int, float, float, float]
"""Price, slot, cached tokens, wait, prefill."""


def price_home(
    state: RoutingState,
    slot: int,
    chain: Chain,
    prompt_tokens: float,
    tokens_per_byte: float,
    context_bytes: float,
    pressure: float,
) -> Priced:
    """Return what the prompt costs at home. `context_bytes`: what the binding says that home holds."""
    num_bytes = state.content.cached_bytes(slot, chain)
    if context_bytes > num_bytes:
        num_bytes = int(context_bytes)
    cached = num_bytes * tokens_per_byte
    if cached > prompt_tokens - 1.0:
        cached = prompt_tokens - 1.0
    prefill_s = state.costs.models[slot].seconds(prompt_tokens - cached, cached)
    wait_s = state.load.wait[slot]
    return (wait_s + prefill_s) * (1.0 + prefill_s * pressure), slot, cached, wait_s, prefill_s


def is_settled(home: Priced, prompt_tokens: float, stay_margin_s: float) -> bool:
    """Return whether a session stays at this price, whatever others would cost."""
    price, _, cached, wait_s, _ = home
    return price <= stay_margin_s or (wait_s <= stay_margin_s and 2.0 * cached >= prompt_tokens)


def home_candidate(home: Priced, backend_id: BackendId) -> Candidate:
    """Return home as the first of the ranked candidates."""
    price, _, cached, wait_s, prefill_s = home
    return Candidate(
        backend_id=backend_id,
        price=price,
        reason="home",
        expected_cached_tokens=int(cached),
        wait_s=wait_s,
        prefill_s=prefill_s,
    )


class HomeTest:
    """Decides for bound sessions that stay."""

    __slots__ = ("_policy_name", "_state", "_tokens")

    def __init__(self, state: RoutingState, tokens: TokenRatio, policy_name: str) -> None:
        self._state = state
        self._tokens = tokens
        self._policy_name = policy_name

    def decide(
        self,
        facts: RequestFacts,
        binding: Binding,
        now_s: float,
        avoided: frozenset[BackendId],
        uses_context: bool,
    ) -> Decision | None:
        """Return the decision to stay, or None if more must be known.

        `uses_context`: the binding's context counts as cached, since other replicas may have sent turns.
        """
        state = self._state
        candidates = state.candidates
        slot, _ = find_home(candidates, facts.model, binding)
        if slot is None:
            return None
        ratio = self._tokens.get(facts.model)
        chain, prompt_tokens = measure_prompt(facts, binding, ratio)
        num_backends = num_choices(candidates, candidates.for_model(facts.model), avoided)
        home = price_home(
            state,
            slot,
            chain,
            prompt_tokens,
            ratio,
            binding.context_tokens / ratio if uses_context else 0.0,
            state.traffic.pressure(now_s, num_backends, state.costs.fleet_scale),
        )
        if not is_settled(home, prompt_tokens, state.settings.stay_margin_s):
            return None
        candidate = home_candidate(home, binding.backend_id)
        return Decision(
            backend_id=candidate.backend_id,
            affinity=Affinity.HIT,
            reason="home",
            ranked=(candidate,),
            key_source=facts.key_source,
            expected_cached_tokens=candidate.expected_cached_tokens,
            prompt_tokens=int(prompt_tokens),
            policy=self._policy_name,
        )
