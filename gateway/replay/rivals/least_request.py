"""Fewest requests in flight, by weight: what most load balancers call least connections."""

from __future__ import annotations

from gateway.replay.rivals.rival import RivalPolicy
from gateway.routing.placement_request import PlacementRequest
from gateway.values import Candidate


class LeastRequestPolicy(RivalPolicy):
    name = "least_request"

    def rank(self, request: PlacementRequest) -> list[Candidate]:
        return self._order(self._in_flight(request), "least_requests")

    def _in_flight(self, request: PlacementRequest) -> dict[int, float]:
        in_flight, shares = self._state.load.in_flight, request.shares or {}
        return {slot: in_flight[slot] / shares.get(slot, 1.0) for slot in request.slots}
