"""Steps 5 and 6, the parts that know headers and statuses: what an attempt sends, and what its head means.

What is sent is what was received, but for the head's own rules (`wire.headers`), the backend's key, a salt
and a question for usage. What a head says of its backend (overload, sickness, a wish to rest) is told from
here; a head that another backend can better becomes an UpstreamError.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Final

from gateway.errors import UpstreamError, UpstreamFailed, UpstreamUnavailable
from gateway.limits.cooldowns import parse_retry_after
from gateway.request.attempt import Attempt
from gateway.request.outcomes import outcome_of
from gateway.request.parts import ProxyParts
from gateway.request.refuse import log_fault
from gateway.request.tracing import RawHeaders
from gateway.request.turn import Turn
from gateway.routing.health import Outcome, outcome_of_status
from gateway.upstream.answer import UpstreamAnswer
from gateway.upstream.pool import UpstreamPool
from gateway.values import AttemptOutcome, BackendId
from gateway.wire.asked_usage import ASKED_ENGINES, UsageFilter, with_usage_asked
from gateway.wire.cache_salt import CacheSalting
from gateway.wire.headers import RequestHeads, bearer, find_header, response_headers

MAX_HELD_BYTES: Final = 65_536
"""An answer that is longer than this has begun, whatever it holds."""
IN_BAND: Final = "in_band_error"
"""Label of an error that a backend reports inside a good answer."""


class NotYetKnown(Exception):
    """What has come of an answer does not tell yet whose it is."""


class Forwarder:
    """Prepares attempts and judges their heads under one configuration."""

    def __init__(self, parts: ProxyParts) -> None:
        self._fleet, self._pools, self._metrics = parts.fleet, parts.pools, parts.metrics
        self._prober = parts.prober
        self._cooldowns, self._clock = parts.admission.cooldowns, parts.clock
        config = parts.config
        self._ask_for_usage = config.limits.ask_for_usage
        self._failover = config.failover
        self._heads = RequestHeads(config.headers, passes_credentials=config.passes_client_credentials)
        self._passes_client_key = config.passes_client_key
        authentication = config.authentication
        self._salting = CacheSalting(
            authentication.also_salted, shares_unsalted=authentication.unsalted == "share"
        )

    def prepare(self, turn: Turn, attempt: Attempt) -> None:
        """Make the bytes to send, and find the pool of the chosen backend. Raises UpstreamConnectFailed."""
        backend_id = turn.backend_id
        assert backend_id is not None
        pool = attempt.pool = self._pools.get(backend_id)
        turn.placement.num_attempts += 1
        turn.sent_body = self._body_for(turn, attempt, backend_id)
        attempt.may_upgrade = turn.is_upgrade
        attempt.request_head = self._request_head(turn, backend_id, pool)
        if turn.outcome.sent_s is None:
            turn.outcome.sent_s = self._clock()

    def _body_for(self, turn: Turn, attempt: Attempt, backend_id: BackendId) -> bytes:
        """The received bytes; with its tenant's salt, and with a question for its usage, where the engine has
        such fields."""
        body, salt, asks = turn.body, turn.tenant.cache_salt, self._asks_for_usage(turn)
        backend = self._fleet.view.get(backend_id) if asks or salt is not None else None
        if backend is None:
            return body
        if salt is not None:
            encoding = turn.request.content_encoding
            body = self._salting.salted(backend.engine, turn.api, turn.route.path, body, salt, encoding)
        if asks and backend.engine in ASKED_ENGINES:
            body, attempt.usage_filter = with_usage_asked(body), UsageFilter(backend.engine)
        return body

    def _asks_for_usage(self, turn: Turn) -> bool:
        """Whether the gateway wants to know the usage of a stream whose client does not."""
        if not turn.facts.lacks_usage or turn.request.content_encoding is not None:
            return False
        if self._ask_for_usage == "limited":
            return turn.charge is not None and turn.charge.limits.tokens_per_minute is not None
        return self._ask_for_usage == "always"

    def _request_head(self, turn: Turn, backend_id: BackendId, pool: UpstreamPool) -> bytes:
        api_key, request = self._fleet.api_key(backend_id), turn.request
        backend = self._fleet.view.get(backend_id)
        raw_headers: RawHeaders = request.raw_headers
        if turn.trace is not None:
            raw_headers = turn.trace.begin_attempt(self._fleet.view.get(backend_id), raw_headers)
        has_body = bool(turn.body) or request.method in ("POST", "PUT", "PATCH")
        return self._heads.build(
            request.method,
            pool.address.path_prefix.decode() + turn.route.target,
            raw_headers,
            host=pool.address.host_header.decode(),
            body_length=len(turn.sent_body) if has_body else None,
            request_id=turn.engine_request_id,
            credential=bearer(api_key) or (turn.credential if self._passes_client_key else None),
            rank=None if backend is None else backend.rank,
            is_upgrade=turn.is_upgrade,
        )

    def judge(self, turn: Turn, attempt: Attempt, *, is_last: bool) -> UpstreamUnavailable | None:
        """Say what the answer so far means, and note what it says of its backend.

        None: it is the client's answer. An error: it is nobody's content, and another backend may do better.
        Raises NotYetKnown while neither can be told. Says the one or the other once.
        """
        status = attempt.status
        if status >= 400:
            if not (is_last or any(attempt.held)):
                raise NotYetKnown  # the body may say why
            return self._judge_status(turn, attempt)
        observer = attempt.observer
        if observer is None:
            return None
        error_status = None if observer.has_first_token else observer.read_error(is_last=is_last)
        if error_status is not None:
            return self._judge_error(turn, error_status)
        is_known = observer.has_content if attempt.is_event_stream else any(attempt.held)
        if is_known or is_last or sum(map(len, attempt.held)) > MAX_HELD_BYTES:
            return None
        raise NotYetKnown

    def _judge_status(self, turn: Turn, attempt: Attempt) -> UpstreamUnavailable | None:
        status, backend_id = attempt.status, turn.backend_id
        assert backend_id is not None
        if status == 404 and turn.facts.model is not None:
            self._prober.list_soon()  # perhaps the model has left
        retry_after_s = self._retry_after(attempt, backend_id) if status in (429, 503) else None
        outcome = outcome_of_status(
            status,
            has_retry_after=retry_after_s is not None,
            has_queue=status == 503 and self._fleet.has_queue(backend_id),
            words=b"".join(attempt.held),
        )
        self._fleet.observe_outcome(backend_id, outcome, f"status_{status}")
        if status not in self._failover.retry_statuses:
            return None
        return UpstreamUnavailable(f"backend {backend_id} answered {status}", retry_after_s=retry_after_s)

    def _judge_error(self, turn: Turn, status: int) -> UpstreamUnavailable | None:
        """Of an error in place of content, in an answer whose own status is good."""
        backend_id = turn.backend_id
        assert backend_id is not None
        self._fleet.observe_outcome(backend_id, outcome_of_status(status), IN_BAND)
        self._metrics.upstream_errors[backend_id, IN_BAND] += 1.0
        if status < 500 and status not in self._failover.retry_statuses:
            return None
        return UpstreamFailed(f"backend {backend_id} reported an error ({status}) in place of an answer")

    def _retry_after(self, attempt: Attempt, backend_id: BackendId) -> float | None:
        """What an overloaded backend asks for; it is then spared by new sessions."""
        value = find_header(attempt.headers, b"retry-after")
        seconds = None if value is None else parse_retry_after(value, time.time())
        if seconds is not None:
            self._cooldowns.note(backend_id, seconds, self._clock())
        return seconds

    def note_failure(self, turn: Turn, error: UpstreamError) -> None:
        """Count a failed attempt, against its backend's health too."""
        backend_id = turn.backend_id
        assert backend_id is not None
        if not isinstance(error, UpstreamFailed):  # it was counted when it came
            self._metrics.upstream_errors[backend_id, error.code] += 1.0
        if not isinstance(error, UpstreamUnavailable):  # what it said was judged when it came
            self._fleet.observe_outcome(backend_id, Outcome.FAILURE, error.code)

    def note_end(self, turn: Turn) -> None:
        """Judge a turn that has ended, and note what that says of its backend. Never raises."""
        outcome, backend_id = turn.outcome, turn.backend_id
        try:
            if outcome.observer is not None:
                outcome.observer.finish()
            result = outcome.result = outcome_of(outcome)
        except Exception as error:
            log_fault(turn.request_id, error)
            return
        if not outcome.is_begun or outcome.error is not None or backend_id is None:
            return  # a failed attempt was counted when it failed
        if result is AttemptOutcome.COMPLETE:
            if outcome.status < 400:
                self._fleet.observe_outcome(backend_id, Outcome.SUCCESS)
        elif result is AttemptOutcome.FAILED_IN_STREAM:
            self._fleet.observe_outcome(backend_id, Outcome.FAILURE, IN_BAND)
            self._metrics.upstream_errors[backend_id, IN_BAND] += 1.0


def is_event_stream(answer: UpstreamAnswer) -> bool:
    content_type = find_header(answer.headers, b"content-type")
    return content_type is not None and content_type.lower().startswith(b"text/event-stream")


def answer_headers(turn: Turn, answer: UpstreamAnswer, is_stream: bool) -> list[tuple[bytes, bytes]]:
    """The backend's end-to-end headers, and what the gateway tells about its decision."""
    placement = turn.placement
    decision = placement.decision
    assert decision is not None
    headers = response_headers(answer.headers)
    if turn.cors_headers:
        headers = [header for header in headers if not header[0].startswith(b"access-control-")]
        headers += [(name.encode(), value.encode()) for name, value in turn.cors_headers]
    if turn.charge is not None:
        headers = [header for header in headers if not header[0].startswith(b"x-ratelimit-")]
        headers += [(name.encode(), value.encode()) for name, value in turn.charge.headers()]
    if is_stream:
        headers.append((b"x-accel-buffering", b"no"))  # nginx in front would hold events back
        if find_header(headers, b"cache-control") is None:
            headers.append((b"cache-control", b"no-cache"))  # so may caches, and those that compress
    headers.append((b"x-request-id", turn.request_id.encode()))
    headers += _told(
        decision.backend_id,
        placement.affinity._value_,
        turn.facts.key_source._value_,
        placement.moved_reason or decision.reason,
    )
    return headers


@lru_cache(maxsize=4_096)
def _told(
    backend_id: BackendId, affinity: str, key_source: str, reason: str
) -> tuple[tuple[bytes, bytes], ...]:
    """What an answer tells of its decision. Few answers differ in it."""
    return (
        (b"x-homing-backend", backend_id.encode()),
        (b"x-homing-affinity", affinity.encode()),
        (b"x-homing-key-source", key_source.encode()),
        (b"x-homing-reason", reason.encode()),
    )
