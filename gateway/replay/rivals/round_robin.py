"""Round robin: each backend in turn, by weight; knows neither sessions nor load. The naive baseline."""

from __future__ import annotations

from gateway.routing.placement_request import EventlessPolicy, PlacementRequest
from gateway.values import Candidate


class RoundRobinPolicy(EventlessPolicy):
    name = "round_robin"

    def rank(self, question: PlacementRequest) -> list[Candidate]:
        return self._order(dict.fromkeys(question.slots, 0.0), "turn")
