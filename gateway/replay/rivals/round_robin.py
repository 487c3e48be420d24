"""Round robin: each backend in turn, by weight. Knows neither sessions nor load; the naive baseline."""

from __future__ import annotations

from gateway.replay.rivals.rival import RivalPolicy
from gateway.routing.placement_request import PlacementRequest
from gateway.values import Candidate


class RoundRobinPolicy(RivalPolicy):
    name = "round_robin"

    def rank(self, request: PlacementRequest) -> list[Candidate]:
        return self._order(dict.fromkeys(request.slots, 0.0), "turn")
