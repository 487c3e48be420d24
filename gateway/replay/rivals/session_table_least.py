"""A session table: a session stays home for ever, a new one goes to the fewest requests in flight."""

from __future__ import annotations

from gateway.replay.rivals.least_request import LeastRequestPolicy
from gateway.routing.placement_request import PlacementRequest
from gateway.values import Candidate


class SessionTableLeastPolicy(LeastRequestPolicy):
    name = "session_table_least"

    def rank(self, request: PlacementRequest) -> list[Candidate]:
        if request.home is not None:
            return self._order({request.home: 0.0}, "home")
        return super().rank(request)
