"""Cost as in Dynamo: prefill tokens, outstanding and own, plus the tokens of the requests that run.

cost = uncached tokens + prefill tokens outstanding + active tokens. Content comes from the router's index
(exact if engine events feed it). A weight of 1 trades a token of recomputation for a token of decode.
"""

from __future__ import annotations

from gateway.replay.rivals.rival import RivalPolicy
from gateway.routing.placement_request import PlacementRequest, RoutingState
from gateway.routing.reservation import Reservation
from gateway.values import Candidate


class KvCostPolicy(RivalPolicy):
    name = "kv_cost"
    has_events = True

    def __init__(self, state: RoutingState) -> None:
        super().__init__(state)
        self._prefill: dict[int, float] = {}  # tokens sent and not yet prefilled, by slot
        self._active: dict[int, float] = {}  # prompt tokens of all requests in flight, by slot

    def rank(self, request: PlacementRequest) -> list[Candidate]:
        cached: dict[int, float] = {}
        for slots, num_bytes in reversed(self._state.content.levels(request.chain)):
            cached.update(dict.fromkeys(slots, num_bytes * request.tokens_per_byte))
        prompt = request.prompt_tokens
        prices = {
            slot: prompt
            - min(cached.get(slot, 0.0), prompt)
            + self._prefill.get(slot, 0.0)
            + self._active.get(slot, 0.0)
            for slot in request.slots
        }
        return self._order(prices, "least_cost")

    @staticmethod
    def _uncached(reservation: Reservation) -> float:
        return reservation.prompt_tokens - reservation.expected_cached_tokens

    def on_reserve(self, reservation: Reservation) -> None:
        slot = reservation.slot
        self._prefill[slot] = self._prefill.get(slot, 0.0) + self._uncached(reservation)
        self._active[slot] = self._active.get(slot, 0.0) + reservation.prompt_tokens

    def on_first_token(self, reservation: Reservation) -> None:
        self._prefill[reservation.slot] = max(
            0.0, self._prefill[reservation.slot] - self._uncached(reservation)
        )

    def on_release(self, reservation: Reservation) -> None:
        self._active[reservation.slot] = max(0.0, self._active[reservation.slot] - reservation.prompt_tokens)

    def on_forget(self, slot: int, *, has_left: bool) -> None:
        if has_left:
            self._prefill.pop(slot, None)
            self._active.pop(slot, None)
