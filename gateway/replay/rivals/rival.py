"""What the policies of other gateways have in common: a price for each slot, and the least price wins."""

from __future__ import annotations

from gateway.routing.placement_request import PolicyBase
from gateway.values import Candidate


class RivalPolicy(PolicyBase):
    """Base of the rivals: they price slots, and equal prices take turns."""

    def _order(self, prices: dict[int, float], reason: str) -> list[Candidate]:
        """Return the slots as candidates, least price first; equal ones by whose turn it is."""
        backend_id, turn = self._state.candidates.backend_id, self._state.load.turn
        ordered = sorted(prices, key=lambda slot: (prices[slot], turn[slot], slot))
        return [Candidate(backend_id=backend_id(slot), price=prices[slot], reason=reason) for slot in ordered]
