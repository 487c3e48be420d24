"""Prefix tree of routed prompts, as `cache_aware` in the SGLang router.

The longest match wins if it is over a threshold, else the backend with the smallest tree. If loads are far
apart (absolutely and relatively), the shortest queue wins, whatever the match. The thresholds are that
router's defaults at the time of the traces study.
"""

from __future__ import annotations

from gateway.replay.rivals.least_request import LeastRequestPolicy
from gateway.routing.placement_request import PlacementRequest, RoutingState
from gateway.routing.reservation import Reservation
from gateway.routing.shadow import Shadow
from gateway.values import Candidate

_MATCH_SHARE = 0.5
_IMBALANCE_REQUESTS = 32
_IMBALANCE_RATIO = 1.1
_TREE_BYTES = 64_000_000  # 16 million tokens per backend


class PrefixTreePolicy(LeastRequestPolicy):
    name = "prefix_tree"
    has_events = True

    def __init__(self, state: RoutingState) -> None:
        super().__init__(state)
        self._tree = Shadow(state.settings.shadow_entries_per_backend)
        self._known: set[int] = set()

    def rank(self, request: PlacementRequest) -> list[Candidate]:
        loads = self._in_flight(request)
        most, least = max(loads.values()), min(loads.values())
        if most - least > _IMBALANCE_REQUESTS and most > _IMBALANCE_RATIO * least:
            return self._order(loads, "least_requests")
        usable = loads.keys()
        total = sum(message.num_bytes for message in request.chain) or 1
        matches = {
            slot: num_bytes
            for slots, num_bytes in self._tree.levels(request.chain)
            for slot in slots
            if slot in usable
        }
        if matches and max(matches.values()) / total > _MATCH_SHARE:
            return self._order({slot: -float(matches.get(slot, 0)) for slot in usable}, "prefix")
        return self._order({slot: float(self._tree.used_bytes(slot)) for slot in usable}, "smallest_tree")

    def on_reserve(self, reservation: Reservation) -> None:
        if reservation.slot not in self._known:
            self._known.add(reservation.slot)
            self._tree.set_capacity(reservation.slot, _TREE_BYTES)
        if reservation.chain:
            self._tree.insert(reservation.slot, reservation.chain)

    def on_forget(self, slot: int, *, has_left: bool) -> None:
        self._tree.forget(slot)
