"""One attempt at one backend: send the request, and return once the response head is here.

What is sent is what was received, but for the head's own rules (`wire.headers`), the backend's key and a
tenant's cache salt. What a head says of its backend (overload, sickness, a wish to rest) is told from here; a
head that another backend can better becomes an UpstreamError. What happens to the answer is not known here.
"""

from __future__ import annotations

import time

from aiohttp import web

from gateway.errors import UpstreamError, UpstreamUnavailable
from gateway.limits.cooldowns import parse_retry_after
from gateway.request.parts import ProxyParts
from gateway.request.tracing import RawHeaders
from gateway.request.turn import Turn
from gateway.routing.health import Outcome, outcome_of_status
from gateway.upstream.exchange import Exchange
from gateway.upstream.pool import UpstreamPool
from gateway.values import BackendId, Decision
from gateway.wire.cache_salt import SALTED_ENGINES, with_cache_salt
from gateway.wire.headers import RequestHeads, find_header


class Forwarder:
    """Opens exchanges under one configuration."""

    def __init__(self, parts: ProxyParts) -> None:
        self._fleet, self._pools, self._metrics = parts.fleet, parts.pools, parts.metrics
        self._cooldowns, self._clock = parts.admission.cooldowns, parts.clock
        config = parts.config
        self._failover = config.failover
        self._heads = RequestHeads(config.headers, passes_credentials=config.passes_client_credentials)

    async def open(self, request: web.BaseRequest, turn: Turn, decision: Decision) -> Exchange:
        """Send the received bytes; return once the response head is here. Raises UpstreamError."""
        turn.num_attempts += 1
        pool = self._pools.get(decision.backend_id)
        turn.sent_body = self._body_for(request, turn, decision)
        head = self._request_head(request, turn, decision, pool)
        if turn.sent_s is None:
            turn.sent_s = self._clock()
        exchange = await pool.open(head, turn.sent_body, method=request.method, may_upgrade=turn.is_upgrade)
        retry_after_s = self._retry_after(exchange, decision) if exchange.status in (429, 503) else None
        outcome = outcome_of_status(exchange.status, has_retry_after=retry_after_s is not None)
        if outcome is not Outcome.SUCCESS:  # a good one counts when the answer is complete
            self._fleet.observe_outcome(decision.backend_id, outcome, f"status_{exchange.status}")
        if exchange.status in self._failover.retry_statuses and self.has_alternative(turn, decision):
            exchange.abort()
            raise UpstreamUnavailable(
                f"backend {decision.backend_id} answered {exchange.status}", retry_after_s=retry_after_s
            )
        return exchange

    def _body_for(self, request: web.BaseRequest, turn: Turn, decision: Decision) -> bytes:
        """The received bytes; with its tenant's salt for an engine that keeps caches apart by one."""
        salt = turn.tenant.cache_salt
        backend = self._fleet.view.get(decision.backend_id) if salt is not None else None
        if salt is None or backend is None or backend.engine not in SALTED_ENGINES:
            return turn.body
        return with_cache_salt(turn.api, turn.body, salt, request.headers.get("content-encoding"))

    def _retry_after(self, exchange: Exchange, decision: Decision) -> float | None:
        """What an overloaded backend asks for; it is then spared by new sessions."""
        value = find_header(exchange.headers, b"retry-after")
        seconds = None if value is None else parse_retry_after(value, time.time())
        if seconds is not None:
            self._cooldowns.note(decision.backend_id, seconds, self._clock())
        return seconds

    def _request_head(
        self, request: web.BaseRequest, turn: Turn, decision: Decision, pool: UpstreamPool
    ) -> bytes:
        api_key = self._fleet.api_key(decision.backend_id)
        raw_headers: RawHeaders = request.raw_headers
        if turn.trace is not None:
            raw_headers = turn.trace.begin_attempt(self._fleet.view.get(decision.backend_id), raw_headers)
        has_body = bool(turn.body) or request.method in ("POST", "PUT", "PATCH")
        return self._heads.build(
            request.method,
            pool.address.path_prefix.decode() + turn.target,
            raw_headers,
            host=pool.address.host_header.decode(),
            body_length=len(turn.sent_body) if has_body else None,
            request_id=turn.request_id,
            authorization=f"Bearer {api_key}" if api_key else None,
            is_upgrade=turn.is_upgrade,
        )

    def note_failure(self, backend_id: BackendId, error: UpstreamError) -> None:
        """Count a failed attempt, against its backend's health too."""
        self._metrics.upstream_errors[backend_id, error.code] += 1.0
        if not isinstance(error, UpstreamUnavailable):  # its status was judged when it came
            self._fleet.observe_outcome(backend_id, Outcome.FAILURE, error.code)

    def has_alternative(self, turn: Turn, decision: Decision) -> bool:
        """Whether another backend is left that could take this request."""
        excluded = turn.tried | {decision.backend_id}
        return turn.num_attempts < self._failover.max_attempts and any(
            backend.state.is_routable and backend_id not in excluded
            for backend_id, backend in self._fleet.view.backends.items()
        )
