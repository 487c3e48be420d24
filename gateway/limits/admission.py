"""Whether and when a request may start: one gate for the process, one per backend if configured, and one
bound on all waiting requests.

The proxy calls, in this order: `check_arrival` before anything is read; `try_enter`, or else `wait`, once it
knows whether the request continues a conversation; `choose` to get a backend with a free place. The caller
that entered a gate leaves it exactly once. Without a queue, `check_arrival` already keeps the gate from being
full. Knows nothing of HTTP, sessions or how backends are chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from gateway.limits.cooldowns import Cooldowns
from gateway.limits.gate import Gate, QueueRoom
from gateway.limits.settings import LimitSettings
from gateway.values import BackendId, Decision, FleetView

_NONE: frozenset[BackendId] = frozenset()


@dataclass(slots=True)
class QueueTicket:
    """One request's position in every queue that it joins."""

    rank: float  # smaller is earlier
    deadline_s: float  # until when it may wait, over all gates
    waited_s: float = 0.0  # so far


class Admission:
    """All gates of one gateway process."""

    def __init__(self, settings: LimitSettings, *, clock: Callable[[], float]) -> None:
        self._settings, self._clock = settings, clock
        self._max_arrived = settings.max_in_flight + settings.queue_size
        self.room = QueueRoom(settings.queue_size)
        self.cooldowns = Cooldowns(settings.max_retry_after_s)
        self._gate = Gate(settings.max_in_flight, self.room)
        self.try_enter, self.leave = self._gate.try_enter, self._gate.leave
        self.has_backend_gates = settings.max_in_flight_per_backend is not None
        self._backend_gates: dict[BackendId, Gate] = {}

    def reconfigure(self, settings: LimitSettings) -> None:
        """Apply these limits from now on. Running requests stay; waiting ones get any new places."""
        self._settings = settings
        self._max_arrived = settings.max_in_flight + settings.queue_size
        self.room.size = settings.queue_size
        self.cooldowns.max_cooldown_s = settings.max_retry_after_s
        self.has_backend_gates = settings.max_in_flight_per_backend is not None
        self._gate.resize(settings.max_in_flight)
        for gate in self._backend_gates.values():
            gate.resize(self._num_backend_places)

    @property
    def _num_backend_places(self) -> int:
        """Without a limit the gates stay, because requests that entered one must leave it."""
        limit = self._settings.max_in_flight_per_backend
        return sys.maxsize if limit is None else limit

    def check_arrival(self, num_arrived: int) -> None:
        """Refuse a request that could neither run nor wait, before it is read. Raises Overloaded."""
        if num_arrived > self._max_arrived:
            raise self.room.refuse(
                "in_flight", f"this gateway has {num_arrived - 1} requests in flight, which is its limit"
            )

    def ticket(self, *, is_follow_up: bool, priority: int = 0) -> QueueTicket:
        """Return the queue ticket of a request that starts to wait now."""
        now_s = self._clock()
        lead_s = self._settings.queue_priority_step_s * (is_follow_up + priority)
        return QueueTicket(now_s - lead_s, now_s + self._settings.queue_timeout_s)

    async def wait(self, ticket: QueueTicket, gate: Gate | None = None) -> None:
        """Wait for a place at the given gate, by default that of the process. Raises Overloaded. Safe to
        cancel."""
        since_s = self._clock()
        try:
            await (gate or self._gate).wait(ticket.rank, max(0.0, ticket.deadline_s - since_s))
        finally:
            ticket.waited_s += self._clock() - since_s

    # -- backends

    def avoided(self, now_s: float) -> frozenset[BackendId]:
        """Return the backends that should get no new sessions while others can take them."""
        cooling = self.cooldowns.cooling(now_s)
        if not self._backend_gates and not cooling:
            return _NONE
        full = [backend_id for backend_id, gate in self._backend_gates.items() if gate.is_full]
        return frozenset(full + cooling)

    async def choose(self, decide: Callable[[], Decision], ticket: QueueTicket) -> Decision:
        """Return a decision with a place on its backend; give the place back with `leave_backend`.

        Waits if the chosen backend is full, then decides again, because the fleet may have changed: nothing
        is awaited between the last decision and the return. Raises Overloaded, or what `decide` raises.
        """
        held: BackendId | None = None
        try:
            while True:
                decision = decide()
                if decision.backend_id == held:
                    return decision
                if held is not None:
                    self.leave_backend(held)
                    held = None
                gate = self._gate_of(decision.backend_id)
                if gate.try_enter():
                    return decision
                try:
                    await self.wait(ticket, gate)
                finally:
                    self._forget_unused(decision.backend_id)
                held = decision.backend_id
        except BaseException:
            if held is not None:
                self.leave_backend(held)
            raise

    def observe_view(self, view: FleetView) -> None:
        """Wake the requests that wait for a backend that is no longer routable: they decide again."""
        for backend_id, gate in self._backend_gates.items():
            backend = view.get(backend_id)
            if backend is None or not backend.state.is_routable:
                gate.dismiss()

    def try_enter_backend(self, backend_id: BackendId) -> bool:
        """Take a place on a backend if one is free; give it back with `leave_backend`."""
        return self._gate_of(backend_id).try_enter()

    def leave_backend(self, backend_id: BackendId) -> None:
        """Give a place on a backend back."""
        self._backend_gates[backend_id].leave()
        self._forget_unused(backend_id)

    def _forget_unused(self, backend_id: BackendId) -> None:
        gate = self._backend_gates.get(backend_id)  # it may have been deleted already
        if gate is not None and gate.is_unused:
            del self._backend_gates[backend_id]

    def _gate_of(self, backend_id: BackendId) -> Gate:
        gate = self._backend_gates.get(backend_id)
        if gate is None:
            gate = self._backend_gates[backend_id] = Gate(self._num_backend_places, self.room)
        return gate
