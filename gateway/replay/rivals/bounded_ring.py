"""Consistent hashing with bounded loads, c = 1.25 on requests in flight (CHWBL: Mirrokni et al., KubeAI).

Small in-flight counts trip the bound by noise and scatter long sessions. Kept for comparison.
"""

from __future__ import annotations

import math

from gateway.replay.rivals.session_ring import SessionRingPolicy
from gateway.routing.placement_request import PlacementRequest
from gateway.values import Candidate

_BOUND = 1.25


class BoundedRingPolicy(SessionRingPolicy):
    name = "bounded_ring"

    def rank(self, request: PlacementRequest) -> list[Candidate]:
        in_flight = self._state.load.in_flight
        slots = list(self._walk(request))
        if not slots:
            return super().rank(request)
        total = sum(in_flight[slot] for slot in slots) + 1
        bound = math.ceil(_BOUND * total / len(slots))
        behind = float(len(slots))  # slots over the bound come after all others
        prices = {
            slot: place + (behind if in_flight[slot] >= bound else 0.0) for place, slot in enumerate(slots)
        }
        return self._order(prices, "ring")
