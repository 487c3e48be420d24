"""One request while it is under way: what was asked, where it goes, what became of it.

A `Turn` is filled in by the steps of `proxy`, belongs to one request, and is read once at the end, by
`recorder`. What lasts beyond the request (binding, shadow, metrics) is written from here.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.downstream.cors import HeaderLines
from gateway.downstream.request import ClientRequest
from gateway.errors import GatewayError
from gateway.limits.admission import QueueTicket
from gateway.limits.tenant_limiter import Charge
from gateway.request.answer_observer import AnswerObserver
from gateway.request.tracing import RequestTrace
from gateway.routing.reservation import Reservation
from gateway.tenants.credentials import RawHeader
from gateway.tenants.tenant import ANONYMOUS, Tenant
from gateway.values import (
    Affinity,
    Api,
    AttemptOutcome,
    BackendId,
    Binding,
    Decision,
    RequestFacts,
    SessionKey,
    StoreBudget,
    Usage,
)
from gateway.wire.routes import Route

if TYPE_CHECKING:
    from gateway.request.attempt import Attempt

Waiting = Coroutine[Any, Any, None]
"""What completes a step that cannot be completed at once."""


class Parked(enum.Enum):
    """Returned by a step that has to be taken again when something calls `Turn.resume`."""

    PARKED = enum.auto()


_UNREAD = RequestFacts(api=Api.OTHER)


def nothing_waits() -> None:
    """Of a turn that no proxy serves."""


class Placement(msgspec.Struct, kw_only=True):
    """Where a request goes, and how that was found."""

    binding: Binding | None = None
    objects: tuple[tuple[SessionKey, Binding], ...] = ()  # of engines, that it names and that are known
    makers: tuple[BackendId, ...] | None = None  # the only ones that may have what it names; None: anyone may
    is_asking: bool = False  # it is not known who has what it names: one that says 404 is not the last word
    asked: frozenset[BackendId] = frozenset()  # those that have said 404
    is_store_away: bool = False  # the store could not bind this session
    decision: Decision | None = None  # the last one made
    affinity: Affinity = Affinity.UNPINNED
    epoch: int = 0  # life of the chosen backend's cache when it was chosen
    reservation: Reservation | None = None  # held on the chosen backend, to be released
    ticket: QueueTicket | None = None  # in the queues it had to join
    holds_place: bool = False  # it counts against `limits.max_in_flight`
    tried: frozenset[BackendId] = frozenset()  # backends that failed this request
    num_attempts: int = 0
    has_listed: bool = False  # its model was unknown, and the backends were asked for theirs
    num_races: int = 0  # times another request bound the session first
    moved_from: BackendId | None = None  # the home that the session left, if it did
    moved_reason: str | None = None  # why the session changed its home, if it did

    @property
    def waited_s(self) -> float:
        """How long it waited for places."""
        return 0.0 if self.ticket is None else self.ticket.waited_s


class TurnOutcome(msgspec.Struct, kw_only=True):
    """What became of a request. Times are monotonic."""

    status: int = 0  # what the client got; 0: nothing yet
    error: GatewayError | None = None
    is_client_gone: bool = False
    is_begun: bool = False  # the client has something of a backend's answer
    result: AttemptOutcome = AttemptOutcome.NOT_SENT  # judged at the end, by `outcomes`
    sent_s: float | None = None  # when the first upstream bytes left
    first_token_s: float | None = None
    remembered_id: str | None = None  # of a stored answer, once others can ask for it
    observer: AnswerObserver | None = None  # of an answer that was relayed

    @property
    def is_answered(self) -> bool:
        """A whole answer was relayed."""
        return self.observer is not None and self.error is None and not self.is_client_gone

    @property
    def usage(self) -> Usage | None:
        return self.observer.usage if self.observer is not None else None


class Turn(msgspec.Struct, kw_only=True, eq=False):
    """One request, with its placement and its outcome."""

    request: ClientRequest
    route: Route
    request_id: str  # the client's own where it gave one: as it is told to the client and logged
    engine_request_id: str  # as it is told to engines: nobody can guess or repeat it
    started_s: float
    tenant: Tenant = ANONYMOUS
    credential: RawHeader | None = None  # the header that proved it, where one did
    body: bytes = b""  # as received; given back when an answer begins
    sent_body: bytes = b""  # what the last attempt sent of it
    is_upgrade: bool = False  # the client asks for a WebSocket
    cors_headers: HeaderLines = ()  # for its answer, instead of a backend's own
    facts: RequestFacts = _UNREAD
    store_budget: StoreBudget | None = None  # how long this request may wait for the session store
    charge: Charge | None = None  # to its tenant, where that has limits
    trace: RequestTrace | None = None  # None: not traced
    is_debug: bool = False  # an operator asked to have it told in full
    placement: Placement = msgspec.field(default_factory=Placement)
    outcome: TurnOutcome = msgspec.field(default_factory=TurnOutcome)
    resume: Callable[[], None] = nothing_waits  # takes the steps that are left; set by the proxy
    step: int = 0  # number of the proxy's step to take next, or why there is none (see `proxy`)
    task: asyncio.Task[None] | None = None  # the coroutine that has taken the turn over, while it waits
    attempt: Attempt | None = None  # under way at a backend

    @property
    def api(self) -> Api:
        return self.route.api

    @property
    def backend_id(self) -> BackendId | None:
        decision = self.placement.decision
        return None if decision is None else decision.backend_id
