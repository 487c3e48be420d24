"""Steps 2 to 4 of a request: its session's binding, a place to run, the backend, and the session's home.

Invariants. Nothing is awaited between `decide` and `reserve`. What must be awaited about a decision (claim,
move) comes after the reservation; if another request bound the session first, the reservation is given back
and the session's home decides. What a turn holds here is given back once, by `release` or `leave`.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from gateway.errors import BadRequest, ModelNotFound
from gateway.request.parts import ProxyParts
from gateway.request.turn import Turn, Waiting
from gateway.routing.makers import check_maker, decide_for_maker
from gateway.routing.selection import OVER_BOUND
from gateway.sessions.store import Unknown
from gateway.values import Affinity, Api, BackendId, Decision

MAX_BINDING_RACES: Final = 3
"""How often one request may find that another bound its session first, before it goes on unpinned."""
PLACE_STEP: Final = 3
"""Of `place` among the proxy's steps: whoever has to decide again goes back there."""


class Placer:
    """Places turns under one configuration. Each public call is a step of `proxy`."""

    def __init__(self, parts: ProxyParts) -> None:
        self._clock, self._router, self._sessions = parts.clock, parts.router, parts.sessions
        self._objects, self._prober = parts.objects, parts.prober
        self._fleet, self._retries, self._ledger = parts.fleet, parts.retries, parts.ledger
        self._admission = parts.admission
        self._has_backend_gates = parts.admission.has_backend_gates

    # -- 2 look up

    def look_up(self, turn: Turn) -> Waiting | None:
        facts = turn.facts
        if facts.api is Api.OTHER and not self._router.knows_model(facts.model):
            # on a passed-through path the name may mean something else
            turn.facts = facts = msgspec.structs.replace(facts, model=None)
        key, answer_key = facts.session_key, facts.answer_key
        if answer_key is not None or facts.object_keys:
            return self._look_up_objects(turn)
        if key is not None:
            if key in self._ledger.keys:
                self._ledger.drain()
            binding = self._sessions.peek(key)
            if isinstance(binding, Unknown):
                return self._ask_store(turn)
            turn.placement.binding = binding
        return None

    async def _ask_store(self, turn: Turn) -> None:
        assert turn.facts.session_key is not None
        turn.placement.binding = await self._sessions.get(turn.facts.session_key, turn.store_budget)

    async def _look_up_objects(self, turn: Turn) -> None:
        """The request names what an engine keeps: it must be its tenant's, and goes to who made it.

        Without tenants an id that is not known, such as one from before a restart, is asked for in turn.
        """
        facts, placement, sessions = turn.facts, turn.placement, self._sessions
        if facts.session_key is not None:
            self._ledger.drain()
            await self._ask_store(turn)
        known = [(key, await self._objects.get(key, turn.store_budget)) for key in facts.object_keys]
        bindings = [binding for _, binding in known]
        if facts.answer_key is not None:
            is_same = facts.answer_key == facts.session_key
            bindings.append(
                placement.binding if is_same else await sessions.get(facts.answer_key, turn.store_budget)
            )
        for binding in bindings:
            turn.tenant.check_object(binding)
        placement.objects = tuple((key, binding) for key, binding in known if binding is not None)
        makers = {binding.backend_id for binding in bindings if binding is not None}
        if len(makers) > 1:
            raise BadRequest("the objects that this request names are at different backends")
        placement.makers = tuple(makers) or None
        placement.is_asking = not makers

    def admit(self, turn: Turn) -> Waiting | None:
        self._retries.deposit()
        if self._admission.try_enter():
            turn.placement.holds_place = True
            return None
        return self._queue(turn)

    async def _queue(self, turn: Turn) -> None:
        self._take_ticket(turn)
        assert turn.placement.ticket is not None
        await self._admission.wait(turn.placement.ticket)
        turn.placement.holds_place = True

    def _take_ticket(self, turn: Turn) -> None:
        """Follow-up turns come before new sessions: their history is computed already, and fades."""
        placement = turn.placement
        if placement.ticket is None:
            is_follow_up = turn.facts.is_follow_up or placement.binding is not None
            placement.ticket = self._admission.ticket(
                is_follow_up=is_follow_up, priority=turn.tenant.priority
            )

    # -- 3 decide, 4 reserve

    def place(self, turn: Turn) -> Waiting | None:
        try:
            decision = self._decide(turn)
        except ModelNotFound:
            if turn.placement.has_listed or not self._prober.may_list_anew:
                raise
            return self._list_models(turn)
        if self._has_backend_gates and not self._admission.try_enter_backend(decision.backend_id):
            return self._choose(turn)
        self._reserve(turn, decision)
        return None

    async def _list_models(self, turn: Turn) -> None:
        """Nobody serves the model as far as we know: ask, and decide again."""
        turn.placement.has_listed = True
        await self._prober.list_anew()
        turn.step = PLACE_STEP

    async def _choose(self, turn: Turn) -> None:
        """The chosen backend is full: decide again when it, or a better one, has a place."""
        self._take_ticket(turn)
        assert turn.placement.ticket is not None
        self._reserve(turn, await self._admission.choose(partial(self._decide, turn), turn.placement.ticket))

    def _decide(self, turn: Turn) -> Decision:
        now_s, placement = self._clock(), turn.placement
        if placement.makers is not None:
            return self._decide_for_maker(turn, placement.makers)
        return self._router.decide(
            turn.facts,
            placement.binding,
            now_s,
            excluded=placement.tried,
            avoided=self._admission.avoided(now_s),
            by_ring=placement.is_store_away,
        )

    def _decide_for_maker(self, turn: Turn, makers: tuple[BackendId, ...]) -> Decision:
        gone = turn.placement.tried | turn.placement.asked
        maker = next((maker for maker in makers if maker not in gone), makers[-1])
        check_maker(self._fleet.view, maker)
        return decide_for_maker(turn.facts, turn.placement.binding, maker)

    def _reserve(self, turn: Turn, decision: Decision) -> None:
        """Count in-flight and work on the chosen backend, until `_release`."""
        placement = turn.placement
        placement.decision, placement.affinity = decision, decision.affinity
        backend = self._fleet.view.get(decision.backend_id)
        placement.epoch = backend.epoch if backend is not None else 0
        self._ledger.reserve(turn, self._clock())

    def release(self, turn: Turn) -> None:
        """Give a place on a backend back before the turn has ended: another backend follows, or none."""
        reservation = turn.placement.reservation
        if reservation is not None:
            self._ledger.release(turn)
            if self._has_backend_gates:
                self._admission.leave_backend(reservation.backend_id)

    # -- the session's home agrees with the decision

    def bind(self, turn: Turn) -> Waiting | None:
        facts, placement = turn.facts, turn.placement
        if facts.session_key is None or not facts.sets_binding or placement.is_store_away:
            return None
        if facts.session_key == facts.answer_key:
            return None  # it is bound where the answer was made, by who made it
        if placement.affinity is Affinity.HIT or placement.num_races >= MAX_BINDING_RACES:
            return None
        if placement.decision is not None and placement.decision.reason == OVER_BOUND:
            return None
        return self._claim(turn)

    async def _claim(self, turn: Turn) -> None:
        """Claim or move the session. Back to step 3 when somebody else has bound it meanwhile."""
        try:
            agrees = await self._agree(turn)
        except BaseException:
            self.release(turn)
            raise
        if not agrees:
            self.release(turn)
            turn.placement.num_races += 1
            turn.step = PLACE_STEP

    async def _agree(self, turn: Turn) -> bool:
        placement, key = turn.placement, turn.facts.session_key
        binding, backend_id = placement.binding, turn.backend_id
        assert key is not None
        assert backend_id is not None
        if binding is None:
            held = await self._sessions.claim(key, backend_id, placement.epoch, budget=turn.store_budget)
        else:
            held = await self._sessions.rebind(
                key,
                binding.version,
                backend_id,
                placement.epoch,
                binding.context_tokens,
                budget=turn.store_budget,
            )
        if held is None:
            # No store to ask. A session with a known home goes on; for any other the ring alone decides, on
            # every replica alike.
            placement.is_store_away = binding is None
            return binding is not None
        placement.binding = held
        if held.backend_id != backend_id:
            return held.backend_id in placement.tried
        if binding is not None:
            assert placement.decision is not None
            placement.moved_reason, placement.moved_from = placement.decision.reason, binding.backend_id
        return True

    def leave(self, turn: Turn) -> None:
        """Give the turn's places back at its end; the ledger releases its reservation."""
        placement = turn.placement
        if self._has_backend_gates and placement.reservation is not None:
            self._admission.leave_backend(placement.reservation.backend_id)
        if placement.holds_place:
            self._admission.leave()
