"""What sent and answered requests change for later decisions: shadow, traffic, recent work, learned values.

A request is counted on its backend at once (`LoadTable`: wait and requests in flight). The rest can wait for
a moment, because a session that stays at home does not need it exactly. `take` enters it for many requests
together, one owner after the other, so that the code and the data of each owner are loaded once per batch.

A batch equals its events one by one, bit for bit. Shadow and learning depend on each other (token ratios and
trust set how much a backend holds), so one loop takes all events in order. Traffic, recent work and slow
start depend only on what that loop passes on, so each has a loop of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.routing.learning import Learner
from gateway.routing.news import Exchange
from gateway.routing.placement_request import RoutingState
from gateway.routing.reservation import Reservation
from gateway.routing.shadow import Shadow
from gateway.routing.slow_start import SlowStart
from gateway.values import Affinity


class Bookkeeping:
    """Enters sent and ended requests in the state that full decisions read."""

    __slots__ = ("_candidates", "_costs", "_exchange", "_learner", "_load", "_shadow",
                 "_slow_start", "_traffic")  # fmt: skip

    def __init__(
        self,
        state: RoutingState,
        learner: Learner,
        shadow: Shadow,
        slow_start: SlowStart,
        exchange: Exchange,
    ) -> None:
        self._candidates, self._costs = state.candidates, state.costs
        self._load, self._traffic = state.load, state.traffic
        self._learner, self._shadow, self._slow_start = learner, shadow, slow_start
        self._exchange = exchange

    def take(self, batch: Sequence[Reservation], lives: Sequence[int]) -> None:
        """Enter each reservation as sent where it comes first, as ended where it comes again.

        Skips reservations of backends that have left: `lives` says by slot who has it now.
        """
        insert, learn, models = self._shadow.insert, self._learner.learn, self._costs.models
        sent: list[Reservation] = []
        arrivals: list[tuple[float, float, int, int]] = []
        for reservation in batch:
            slot = reservation.slot
            reservation.num_taken += 1
            if lives[slot] != reservation.life:
                continue
            if reservation.num_taken == 1:
                chain = reservation.chain
                written, regretted = insert(slot, chain) if chain else (0, 0)
                work = reservation.prefill_s / models[slot].scale
                arrivals.append((reservation.sent_s, work, written, regretted))
                sent.append(reservation)
            elif reservation.usage is not None:
                learn(reservation, reservation.usage)
        if sent:
            self._traffic.add_many(arrivals)
            self._load.add_recent(self._shares_of(sent))
            self._count_sessions(sent)
            self._exchange.note(sent)

    def _shares_of(self, sent: list[Reservation]) -> list[tuple[int, float, float, float]]:
        """Return (slot, work, the slot's effective weight, time) of each."""
        candidates, shares = self._candidates, []
        model = sent[0].facts.model
        usable = candidates.for_model(model)
        for reservation in sent:
            if reservation.facts.model != model:
                model = reservation.facts.model
                usable = candidates.for_model(model)
            slot, sent_s = reservation.slot, reservation.sent_s
            shares.append((slot, reservation.prefill_s, candidates.share(slot, usable, sent_s), sent_s))
        return shares

    def _count_sessions(self, sent: list[Reservation]) -> None:
        """Count new sessions and those that lost their home. Changes slow start and load."""
        for reservation in sent:
            affinity = reservation.affinity
            if affinity is Affinity.NEW:
                usable = self._candidates.for_model(reservation.facts.model)
                warming = self._candidates.warming(usable, reservation.sent_s)
                self._slow_start.note_new_session(reservation.slot, warming)
            elif affinity is Affinity.MOVED or affinity is Affinity.FAILOVER:
                self._load.adopted[reservation.slot] += 1
