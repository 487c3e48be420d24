"""Whether a request may begin, and when: one gate for the whole process, one for each backend if so
configured, one bound on all that wait.

The proxy asks in this order: `check_arrival` before anything is read; `try_enter`, or else `wait`, when it
knows whether the request continues a conversation; `choose` to get a backend with a place there. What was
entered is left exactly once, by whom entered it. Without a queue the check at arrival already keeps the gate
from being full. Knows nothing of HTTP, sessions or how backends are chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from gateway.limits.cooldowns import Cooldowns
from gateway.limits.gate import Gate, QueueRoom
from gateway.limits.settings import LimitSettings
from gateway.values import BackendId, Decision, FleetView

_NOBODY: frozenset[BackendId] = frozenset()


@dataclass(slots=True)
class QueueTicket:
    """Of one request, in every line that it has to join."""

    rank: float  # smaller is earlier
    deadline_s: float  # until when it may wait, at all gates together
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
        """Hold to these limits from now on. Who is inside stays; those in line get places that are new."""
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
        """A request that began under a limit still passes its gates when there is none any more."""
        limit = self._settings.max_in_flight_per_backend
        return sys.maxsize if limit is None else limit

    def check_arrival(self, num_arrived: int) -> None:
        """Refuse what could neither run nor wait, before it is read. Raises Overloaded."""
        if num_arrived > self._max_arrived:
            raise self.room.refuse(
                "in_flight", f"this gateway has {num_arrived - 1} requests under way, its limit"
            )

    def ticket(self, *, is_follow_up: bool, priority: int = 0) -> QueueTicket:
        """Return the ticket of a request that begins to wait now."""
        now_s = self._clock()
        lead_s = self._settings.queue_priority_step_s * (is_follow_up + priority)
        return QueueTicket(now_s - lead_s, now_s + self._settings.queue_timeout_s)

    async def wait(self, ticket: QueueTicket, gate: Gate | None = None) -> None:
        """Return with a place, of this process or of the given gate. Raises Overloaded. Safe to cancel."""
        since_s = self._clock()
        try:
            await (gate or self._gate).wait(ticket.rank, max(0.0, ticket.deadline_s - since_s))
        finally:
            ticket.waited_s += self._clock() - since_s

    # -- backends

    def avoided(self, now_s: float) -> frozenset[BackendId]:
        """Return the backends that should get nothing new while another can take it."""
        cooling = self.cooldowns.cooling(now_s)
        if not self._backend_gates and not cooling:
            return _NOBODY
        full = [backend_id for backend_id, gate in self._backend_gates.items() if gate.is_full]
        return frozenset(full + cooling)

    async def choose(self, decide: Callable[[], Decision], ticket: QueueTicket) -> Decision:
        """Return a decision with a place on its backend, to be given back by `leave_backend`.

        Waits where the chosen backend is full, then decides again: the fleet may have changed, and nothing
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
        """Have those who wait for a backend that serves nobody any more decide again."""
        for backend_id, gate in self._backend_gates.items():
            backend = view.get(backend_id)
            if backend is None or not backend.state.is_routable:
                gate.dismiss()

    def try_enter_backend(self, backend_id: BackendId) -> bool:
        """Take a place on a backend if there is one, to be given back by `leave_backend`."""
        return self._gate_of(backend_id).try_enter()

    def leave_backend(self, backend_id: BackendId) -> None:
        """Give a place on a backend back."""
        self._backend_gates[backend_id].leave()
        self._forget_unused(backend_id)

    def _forget_unused(self, backend_id: BackendId) -> None:
        gate = self._backend_gates.get(backend_id)  # the last to leave may have been quicker
        if gate is not None and gate.is_unused:
            del self._backend_gates[backend_id]

    def _gate_of(self, backend_id: BackendId) -> Gate:
        gate = self._backend_gates.get(backend_id)
        if gate is None:
            gate = self._backend_gates[backend_id] = Gate(self._num_backend_places, self.room)
        return gate
