"""Consistent hashing of the session, else of the prompt group: no load, no table (as in production-stack)."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.replay.rivals.least_request import LeastRequestPolicy
from gateway.routing.placement_request import PlacementRequest
from gateway.values import Candidate


class SessionRingPolicy(LeastRequestPolicy):
    name = "session_ring"

    def rank(self, request: PlacementRequest) -> list[Candidate]:
        slots = list(self._walk(request))
        if not slots:
            return super().rank(request)
        return self._order({slot: float(place) for place, slot in enumerate(slots)}, "ring")

    def _walk(self, request: PlacementRequest) -> Iterator[int]:
        """Yield the usable slots in ring order; nothing without a key."""
        key = request.facts.session_key or request.facts.prompt_key
        if key is None:
            return
        allowed = frozenset(request.slots) | (frozenset() if request.home is None else {request.home})
        slot_of = self._state.candidates.slot_of
        for backend_id in self._state.candidates.ring.walk(key):
            slot = slot_of[backend_id]
            if slot in allowed:
                yield slot
