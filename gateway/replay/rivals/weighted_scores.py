"""Scores as in llm-d: prefix match 3, queue length 2, free KV memory 2, each between 0 and 1.

The queue is the requests that wait for their first token here. KV use is the prompt tokens in flight over the
capacity. Equal scores take turns.
"""

from __future__ import annotations

from gateway.replay.rivals.rival import RivalPolicy
from gateway.routing.placement_request import PlacementRequest, RoutingState
from gateway.routing.reservation import Reservation
from gateway.values import Candidate

_PREFIX_WEIGHT, _QUEUE_WEIGHT, _KV_WEIGHT = 3.0, 2.0, 2.0


class WeightedScoresPolicy(RivalPolicy):
    name = "weighted_scores"
    has_events = True

    def __init__(self, state: RoutingState) -> None:
        super().__init__(state)
        self._active: dict[int, float] = {}

    def rank(self, request: PlacementRequest) -> list[Candidate]:
        slots, load = request.slots, self._state.load
        matched: dict[int, int] = {}
        for holders, num_bytes in reversed(self._state.content.levels(request.chain)):
            matched.update(dict.fromkeys(holders, num_bytes))
        total = sum(message.num_bytes for message in request.chain) or 1
        queues = {slot: load.unanswered[slot] for slot in slots}
        least, most = min(queues.values()), max(queues.values())
        prices = {}
        for slot in slots:
            queue = 1.0 if most == least else (most - queues[slot]) / (most - least)
            free = 1.0 - min(1.0, self._active.get(slot, 0.0) / self._capacity_tokens(slot))
            score = _PREFIX_WEIGHT * min(1.0, matched.get(slot, 0) / total)
            prices[slot] = -round(score + _QUEUE_WEIGHT * queue + _KV_WEIGHT * free, 9)
        return self._order(prices, "score")

    def _capacity_tokens(self, slot: int) -> int:
        backend = self._state.candidates.backends[slot]
        known = None if backend is None else backend.kv_capacity_tokens
        return known or self._state.settings.kv_capacity_tokens

    def on_reserve(self, reservation: Reservation) -> None:
        self._active[reservation.slot] = self._active.get(reservation.slot, 0.0) + reservation.prompt_tokens

    def on_release(self, reservation: Reservation) -> None:
        self._active[reservation.slot] = max(0.0, self._active[reservation.slot] - reservation.prompt_tokens)

    def on_forget(self, slot: int, *, has_left: bool) -> None:
        if has_left:
            self._active.pop(slot, None)
