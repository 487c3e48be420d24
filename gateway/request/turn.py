"""The record of one request while it is under way: filled in step by step, read once at the end.

Mutable on purpose and private to one task. What lasts beyond the request (binding, shadow, metrics) is
written from here by `record.Recorder`.
"""

from __future__ import annotations

import msgspec

from gateway.errors import GatewayError
from gateway.limits.admission import QueueTicket
from gateway.limits.tenant_limiter import Charge
from gateway.request.answer_observer import AnswerObserver
from gateway.request.tracing import RequestTrace
from gateway.tenants.tenant import ANONYMOUS, Tenant
from gateway.values import Affinity, Api, BackendId, Binding, Decision, RequestFacts, Usage

_UNREAD = RequestFacts(api=Api.OTHER)


class Turn(msgspec.Struct, kw_only=True):
    """One request's story."""

    request_id: str
    api: Api
    started_s: float  # monotonic
    tenant: Tenant = ANONYMOUS
    target: str = "/"  # path and query as sent to a backend
    body: bytes = b""
    sent_body: bytes = b""  # what the last attempt sent of it
    is_upgrade: bool = False  # the client asks for a WebSocket
    cors_headers: tuple[tuple[bytes, bytes], ...] = ()  # for its answer, instead of a backend's own
    facts: RequestFacts = _UNREAD
    store_deadline_s: float = 0.0  # until when this request may wait for the session store
    binding: Binding | None = None
    is_store_away: bool = False  # the store could not bind this session
    decision: Decision | None = None  # the last one made
    affinity: Affinity = Affinity.UNPINNED
    epoch: int = 0  # life of the chosen backend's cache when it was chosen
    ticket: QueueTicket | None = None  # in the lines it had to join
    charge: Charge | None = None  # to its tenant, where that has limits
    holds_place: bool = False  # it counts against `limits.max_in_flight`
    tried: frozenset[BackendId] = frozenset()  # backends that failed this request
    num_attempts: int = 0
    num_races: int = 0  # times another request bound the session first
    moved_from: BackendId | None = None  # the home that the session left, if it did
    moved_reason: str | None = None  # why the session changed its home, if it did
    sent_s: float | None = None  # when the first upstream bytes left
    first_token_s: float | None = None
    status: int = 0  # what the client got; 0: nothing
    error: GatewayError | None = None
    is_client_gone: bool = False
    observer: AnswerObserver | None = None
    trace: RequestTrace | None = None  # None: not traced
    is_debug: bool = False  # an operator asked to have it told in full

    @property
    def backend_id(self) -> BackendId | None:
        return self.decision.backend_id if self.decision else None

    @property
    def usage(self) -> Usage | None:
        return self.observer.usage if self.observer else None

    @property
    def used_tokens(self) -> int | None:
        """What it cost, as reported; 0 for a request that failed, None where nobody knows."""
        usage = self.usage
        if self.observer is None:
            return None if self.is_client_gone and self.sent_s is not None else 0
        if usage is None or usage.prompt_tokens is None:
            return None
        return usage.prompt_tokens + (usage.completion_tokens or 0)
