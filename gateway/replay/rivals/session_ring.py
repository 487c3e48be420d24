"""Consistent hashing of the session, else of the prompt group: no load, no table (as production-stack)."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.replay.rivals.least_request import LeastRequestPolicy
from gateway.routing.placement_request import PlacementRequest
from gateway.values import Candidate


class SessionRingPolicy(LeastRequestPolicy):
    name = "session_ring"

    def rank(self, question: PlacementRequest) -> list[Candidate]:
        slots = list(self._walk(question))
        if not slots:
            return super().rank(question)
        return self._order({slot: float(place) for place, slot in enumerate(slots)}, "ring")

    def _walk(self, question: PlacementRequest) -> Iterator[int]:
        """Yield the usable slots in ring order; nothing without a key."""
        key = question.facts.session_key or question.facts.prompt_key
        if key is None:
            return
        allowed = frozenset(question.slots) | (frozenset() if question.home is None else {question.home})
        slot_of = self._around.candidates.slot_of
        for backend_id in self._around.candidates.ring.walk(key):
            slot = slot_of[backend_id]
            if slot in allowed:
                yield slot
