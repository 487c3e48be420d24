"""Whether a bound session stays at home, told without a look at any other backend.

Most requests are the next turn of a session whose home is free. Such a session stays, whatever others cost,
if

    its price at home is within `stay_margin_s`, because it never moves to save less than that, or
    its wait at home is within `stay_margin_s`, and home holds at least half of its prompt

So there is no need to know which backends are open, their shares, or who else holds the prompt. `HomeTest`
returns the same decision as `Router.decide_fully`, or None if that must decide. `HomingPolicy` calls
`weigh_home` too, so price and rule exist once.

Two things send even such a request the whole way: engines that run out of KV memory, and keys that are
buckets and have several requests in flight at home, because the load bound applies to them.

Cost: O(1) in backends. In messages O(1) if the prompt adds at most three to a known one, else O(log
messages). Testing changes nothing.
"""

from __future__ import annotations

from gateway.routing.calibration import TokenRatio
from gateway.routing.load import MOST_CROWDING
from gateway.routing.placement_request import RoutingState, measure_prompt
from gateway.routing.selection import find_home, num_choices
from gateway.routing.shadow import Chain
from gateway.values import Affinity, BackendId, Binding, Candidate, Decision, RequestFacts

Priced = tuple[float, int, float, float, float]
"""Price, slot, cached tokens, wait, prefill."""

_CROWDED = 0.5 * MOST_CROWDING  # 10 % of the KV memory is left


def weigh_home(
    state: RoutingState,
    slot: int,
    chain: Chain,
    prompt_tokens: float,
    tokens_per_byte: float,
    context_tokens: float,
    pressure: float,
) -> tuple[Priced, bool]:
    """Return what the prompt costs at home, and whether it stays there whatever others would cost.

    `context_tokens`: what home holds for certain, as the binding says. The price of a session that stays
    leaves out what it evicts and how many requests run there, which nobody needs then.
    """
    cached = state.content.cached_bytes(slot, chain) * tokens_per_byte
    if context_tokens > cached:
        cached = context_tokens
    if cached > prompt_tokens - 1.0:
        cached = prompt_tokens - 1.0
    prefill_s = state.costs.models[slot].seconds(prompt_tokens - cached, cached)
    wait_s = state.load.wait[slot]
    price = (wait_s + prefill_s) * (1.0 + prefill_s * pressure)
    margin_s = state.settings.stay_margin_s
    if wait_s <= margin_s and 2.0 * cached >= prompt_tokens and state.load.crowding[slot] < _CROWDED:
        return (price, slot, cached, wait_s, prefill_s), True
    price += room_price(state, slot, prompt_tokens - cached, prefill_s, tokens_per_byte)
    return (price, slot, cached, wait_s, prefill_s), price <= margin_s


def room_price(
    state: RoutingState, slot: int, uncached: float, prefill_s: float, tokens_per_byte: float
) -> float:
    """Return what the request costs those that are there: they compute again, or run slower."""
    load = state.load
    price = state.settings.decode_price_s * load.running(slot) * load.crowding[slot]
    evicted = uncached - state.content.free_bytes(slot) * tokens_per_byte
    return price + prefill_s * min(1.0, evicted / uncached) if evicted > 0.0 else price


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
        trusts_context: bool,
    ) -> Decision | None:
        """Return the decision to stay, or None if more must be known.

        `trusts_context`: the binding's context counts as cached, since other replicas may have sent turns.
        """
        state = self._state
        candidates, settings = state.candidates, state.settings
        slot, _ = find_home(candidates, facts.model, binding)
        if slot is None or state.load.wait[slot] > settings.stay_margin_s:
            return None  # a price is never below the wait
        if facts.obeys_load_bound and state.load.in_flight[slot] >= settings.load_bound_floor_requests:
            return None  # the bound depends on the load of all
        ratio = self._tokens.get(facts.model)
        chain, prompt_tokens = measure_prompt(facts, binding, ratio)
        usable = candidates.for_model(facts.model)
        if usable.context_tokens:
            return None  # who has room for it depends on its length
        num_backends = num_choices(candidates, usable, avoided) if avoided else len(usable.best)
        pressure = state.traffic.pressure(now_s, num_backends, state.costs.fleet_scale)
        context_tokens = binding.context_tokens if trusts_context else 0.0
        home, stays = weigh_home(state, slot, chain, prompt_tokens, ratio, context_tokens, pressure)
        if not stays:
            return None
        price, _, cached, wait_s, prefill_s = home
        expected = candidates.in_blocks(slot, cached)
        candidate = Candidate(
            backend_id=binding.backend_id,
            price=price,
            reason="home",
            expected_cached_tokens=expected,
            wait_s=wait_s,
            prefill_s=prefill_s,
        )
        return Decision(
            backend_id=binding.backend_id,
            affinity=Affinity.HIT,
            reason="home",
            ranked=(candidate,),
            key_source=facts.key_source,
            expected_cached_tokens=expected,
            prompt_tokens=int(prompt_tokens),
            policy=self._policy_name,
        )
