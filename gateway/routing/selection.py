"""Which backends may take a request: its home, and the slots that a policy chooses from.

The home is the slot where a bound session may stay. Without one, a cause says why it was lost. The slots are
the best tier that has a backend left, less a home that restarted and less the backends that the caller
avoids. If the ring or a slow start decides, only one slot is left. No step removes the last slot.

Selecting changes nothing. It knows no load and no prices. Causes and reasons are a bounded vocabulary,
because they are metric labels.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from gateway.errors import ModelNotFound, NoBackend
from gateway.routing.candidates import ALL_TIERS, OPEN_TIERS, Candidates, ModelBackends
from gateway.routing.placement_request import PlacementRequest
from gateway.routing.slow_start import SlowStart
from gateway.values import Affinity, BackendId, BackendState, Binding, RequestFacts

MOST_ON_TRIAL = 3
"""Requests at a time for a backend on trial: what a broken one may cost at each return."""

OVER_BOUND: Final = "over_load_bound"
"""The reason of a request that its bucket's home may not take now. The bucket stays bound where it is."""

_LOST: Final = {BackendState.DRAINING: "home_draining", BackendState.SLEEPING: "home_asleep"}
_NO_SLOTS: frozenset[int] = frozenset()
Selection = tuple[int | None, str, tuple[int, ...]]
"""Home, cause if it was lost (else ""), and slots to choose from."""


class Selector:
    """Selects slots among the candidates."""

    __slots__ = ("_candidates", "_slow_start")

    def __init__(self, candidates: Candidates, slow_start: SlowStart) -> None:
        self._candidates = candidates
        self._slow_start = slow_start

    def select(
        self,
        facts: RequestFacts,
        binding: Binding | None,
        usable: ModelBackends,
        excluded: frozenset[BackendId],
        avoided: frozenset[BackendId],
        by_ring: bool,
        num_tokens: float,
    ) -> Selection:
        """Return home, cause and slots. There may be no slots. `Router.decide` explains the arguments.

        `num_tokens`: room that the prompt and its answer need.
        """
        candidates = self._candidates
        barred = candidates.slots_of(excluded) if excluded else _NO_SLOTS
        if binding is None:
            home, cause = None, ""
            slots = usable.best_tier(barred, OPEN_TIERS)
        else:
            home, cause = find_home(candidates, facts.model, binding)
            if home in barred:
                home, cause = None, "home_failed"
            slots = usable.best_tier(barred, OPEN_TIERS if excluded else ALL_TIERS)
            if cause == "home_restarted" and slots and slots[0] in usable.tiers[0]:
                # it is cold: its sessions spread over the others instead of all returning at once
                slots = _without(slots, (candidates.slot_of[binding.backend_id],))
        if avoided:
            slots = _without(slots, candidates.slots_of(avoided))
        if usable.context_tokens:
            slots = _fitting(slots, usable, num_tokens)
            if home is not None and slots and home not in slots and not usable.fits(home, num_tokens):
                home, cause = None, "home_too_short"
        if by_ring and home is None:
            slots = self._first_on_ring(facts, slots)
        elif binding is None and facts.session_key is not None:
            owed = self._slow_start.owed(slots)
            slots = slots if owed is None else (owed,)
        return home, cause, slots

    def could_take(self, facts: RequestFacts, excluded: frozenset[BackendId]) -> bool:
        """Whether a backend that is not excluded serves the model, is fit, and open to new sessions."""
        try:
            usable = self._candidates.for_model(facts.model)
        except (NoBackend, ModelNotFound):
            return False
        return bool(usable.best_tier(self._candidates.slots_of(excluded), OPEN_TIERS))

    def on_trial(
        self, usable: ModelBackends, avoided: frozenset[BackendId], in_flight: Sequence[int]
    ) -> tuple[int, ...]:
        """Return a degraded backend that may have another request, alone, if there is one."""
        barred = self._candidates.slots_of(avoided) if avoided else _NO_SLOTS
        free = (slot for slot in usable.tiers[1] if in_flight[slot] < MOST_ON_TRIAL and slot not in barred)
        return tuple(free)[:1]

    def _first_on_ring(self, facts: RequestFacts, slots: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ring's choice of these slots, alone; all of them without a key."""
        key = facts.session_key or facts.prompt_key
        if key is None or not slots:
            return slots
        candidates = self._candidates
        return tuple(candidates.ring.owners(key, 1, frozenset(slots), candidates.slot_of)) or slots


def find_home(candidates: Candidates, model: str | None, binding: Binding) -> tuple[int | None, str]:
    """Return the slot where the session may stay, or None and the cause why it may not."""
    slot = candidates.slot_of.get(binding.backend_id)
    backend = None if slot is None else candidates.backends[slot]
    if slot is None or backend is None:
        return None, "home_removed"
    if binding.epoch < backend.epoch:  # another replica may have seen a later epoch than this one
        return None, "home_restarted"
    if backend.state is not BackendState.READY and not backend.state.keeps_sessions:
        return None, _LOST.get(backend.state, "home_down")
    if model is not None and backend.models is not None and model not in backend.models:
        return None, "home_lacks_model"
    return slot, ""


def num_choices(candidates: Candidates, usable: ModelBackends, avoided: frozenset[BackendId]) -> int:
    """Return how many slots `Selector.select` returns for a session that may stay, without listing them."""
    best = usable.best
    return len(best) - len(best & candidates.slots_of(avoided)) or len(best)


def _fitting(slots: tuple[int, ...], usable: ModelBackends, num_tokens: float) -> tuple[int, ...]:
    """Return the slots with room for so many tokens; if none has it, those with most."""
    fitting = tuple(slot for slot in slots if usable.fits(slot, num_tokens))
    if fitting or not slots:
        return fitting
    lengths = usable.context_tokens or {}
    most = max(lengths.get(slot, 0) for slot in slots)
    return tuple(slot for slot in slots if lengths.get(slot, 0) == most)


def _without(slots: tuple[int, ...], unwanted: Container[int]) -> tuple[int, ...]:
    """Return the slots that are not unwanted; all of them if none would be left."""
    return tuple(slot for slot in slots if slot not in unwanted) or slots


def name_choice(
    request: PlacementRequest, binding: Binding | None, cause: str, chosen: BackendId
) -> tuple[Affinity, str]:
    """Return what became of the session's affinity, and the reason."""
    facts = request.facts
    if binding is not None and cause:
        return Affinity.MOVED, cause
    if binding is not None and request.home is not None:
        if binding.backend_id == chosen:
            return Affinity.HIT, "home"
        return Affinity.SPILLED, OVER_BOUND if request.is_over_bound else "cheaper_elsewhere"
    if facts.session_key is not None:
        return Affinity.NEW, "new_placement"
    return Affinity.UNPINNED, "no_key" if facts.prompt_key is None else "prompt_group"
