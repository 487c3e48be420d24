"""Least requests in flight, per weight: what most load balancers call least connections."""

from __future__ import annotations

from gateway.routing.placement_request import EventlessPolicy, PlacementRequest
from gateway.values import Candidate


class LeastRequestPolicy(EventlessPolicy):
    name = "least_request"

    def rank(self, question: PlacementRequest) -> list[Candidate]:
        return self._order(self._in_flight(question), "least_requests")

    def _in_flight(self, question: PlacementRequest) -> dict[int, float]:
        in_flight, shares = self._around.load.in_flight, question.shares
        return {s: in_flight[s] / (1.0 if shares is None else shares.get(s, 1.0)) for s in question.slots}
