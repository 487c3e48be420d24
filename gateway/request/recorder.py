"""Step 7: what one finished request leaves behind. Metrics, the binding's renewal, one access line.

Called exactly once per request, whatever its end, so that counts add up: every request is in
`homing_requests_total` with the status its client got (499 when the client left first). Token counts come
only from engines that report them; an answer without usage is counted as unknown, never as zero.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from gateway.observability.logs import AccessLine, AccessLog
from gateway.observability.metrics import GatewayMetrics, status_label
from gateway.request.journal import Journal
from gateway.request.request_debug import debug_line
from gateway.request.tracing import RequestTrace
from gateway.request.turn import Turn
from gateway.sessions.store import SessionStore
from gateway.values import Affinity, Api, Binding, Decision
from gateway.wire.facts import FactsParser

CLIENT_CLOSED_REQUEST = 499  # nginx's number for a client that left before its answer was complete

_TURN_LABELS = ("1", "2", "3", "4", "5", "6-9", "6-9", "6-9", "6-9")


class Recorder:
    """Writes down finished turns. Owns the few background writes that a turn may leave."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        sessions: SessionStore,
        parser: FactsParser,
        log: AccessLog,
        journal: Journal | None = None,
    ) -> None:
        self._metrics, self._sessions, self.log = metrics, sessions, log
        self.logs_requests = True  # each; those that an operator asked for are told anyway
        self._parser = parser
        self._journal = journal
        self._writes: set[asyncio.Task[Any]] = set()

    async def record(self, turn: Turn, now_s: float) -> None:
        """Changes: metrics, the session store, the access log."""
        if turn.is_client_gone:
            turn.status = CLIENT_CLOSED_REQUEST
        await self._renew(turn)
        if turn.api is Api.RESPONSES:
            self._remember_response(turn)
        self._count(turn, now_s)
        if turn.trace is not None:
            self._link_trace(turn, turn.trace, now_s)
        if self._journal is not None:
            self._journal.note(turn, now_s)
        if self.logs_requests:
            self.log.write(_access_line(turn, now_s))
        if turn.is_debug:
            self.log.write(debug_line(turn))

    async def close(self) -> None:
        """Wait for background writes; each is bounded by the store's own budget."""
        if self._writes:
            await asyncio.gather(*self._writes, return_exceptions=True)

    async def _renew(self, turn: Turn) -> None:
        """Keep the session alive and remember how long its context has grown."""
        facts, binding, usage = turn.facts, turn.binding, turn.usage
        if binding is None or facts.session_key is None or turn.observer is None:
            return
        context_tokens = binding.context_tokens
        if usage is not None and usage.prompt_tokens is not None:
            context_tokens = usage.prompt_tokens + (usage.completion_tokens or 0)
        await self._sessions.renew(
            facts.session_key, binding, context_tokens=context_tokens, num_turns=binding.num_turns + 1
        )

    def _remember_response(self, turn: Turn) -> None:
        """A follow-up that names this answer must come to the backend that stored it."""
        response_id = turn.observer.response_id if turn.observer is not None else None
        if response_id and turn.decision is not None:
            key = self._parser.response_session_key(turn.tenant.name, response_id)
            self._spawn(self._sessions.claim(key, turn.decision.backend_id, turn.epoch))

    def _spawn(self, write: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(write)
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    def _count(self, turn: Turn, now_s: float) -> None:
        metrics, api = self._metrics, turn.api._value_  # `value` of an Enum member is Python code
        metrics.requests[api, status_label(turn.status)] += 1.0
        metrics.duration.observe(now_s - turn.started_s, api)
        if turn.is_client_gone:
            metrics.client_gone[api] += 1.0
        if turn.error is not None:
            metrics.errors[turn.error.source, turn.error.code] += 1.0
        waited_s = turn.ticket.waited_s if turn.ticket is not None else 0.0
        if waited_s > 0.0:
            metrics.queue_wait.observe(waited_s)
        if turn.decision is None:
            return
        metrics.affinity[turn.affinity._value_, turn.facts.key_source._value_] += 1.0
        if turn.moved_reason is not None:
            metrics.moves[turn.moved_reason] += 1.0
        if turn.sent_s is not None:
            metrics.overhead.observe(turn.sent_s - turn.started_s - waited_s)
        turn_label = _turn_label(turn.binding)
        if turn.first_token_s is not None:
            metrics.time_to_first_token.observe(turn.first_token_s - turn.started_s, turn_label)
        if turn.observer is not None:
            self._count_tokens(turn, turn.decision, turn_label, now_s)

    def _count_tokens(self, turn: Turn, decision: Decision, turn_label: str, now_s: float) -> None:
        """A share is only honest when both of its numbers are known for the same requests."""
        metrics, usage, backend_id = self._metrics, turn.usage, decision.backend_id
        if usage is None or usage.prompt_tokens is None:
            metrics.usage_unknown["usage"] += 1.0
            return
        num_generated = usage.completion_tokens or 0
        metrics.completion_tokens[backend_id] += num_generated
        if turn.first_token_s is not None and num_generated > 1 and turn.error is None:
            metrics.inter_token.observe((now_s - turn.first_token_s) / (num_generated - 1))
        if usage.cached_tokens is None:
            metrics.usage_unknown["cached_tokens"] += 1.0
            return
        num_cached = min(usage.cached_tokens, usage.prompt_tokens)
        metrics.prompt_tokens[backend_id] += usage.prompt_tokens
        metrics.cached_tokens[backend_id] += num_cached
        metrics.expected_tokens[backend_id] += decision.expected_cached_tokens
        metrics.turn_prompt_tokens[turn_label] += usage.prompt_tokens
        metrics.turn_cached_tokens[turn_label] += num_cached
        num_recomputed = min(_known_tokens(turn, decision), usage.prompt_tokens) - num_cached
        if num_recomputed > 0:
            metrics.recomputed_tokens[backend_id, _recompute_cause(turn)] += num_recomputed

    def _link_trace(self, turn: Turn, trace: RequestTrace, now_s: float) -> None:
        """End the spans, and let the buckets that this request fell into name its trace."""
        trace.finish(turn)
        if trace.trace_id is None:
            return
        metrics, wall_s = self._metrics, time.time()
        metrics.duration.remember(now_s - turn.started_s, turn.api.value, trace.trace_id, wall_s)
        if turn.first_token_s is not None:
            ttft_s = turn.first_token_s - turn.started_s
            metrics.time_to_first_token.remember(ttft_s, _turn_label(turn.binding), trace.trace_id, wall_s)


def _known_tokens(turn: Turn, decision: Decision) -> int:
    """How much of the prompt was in some backend's cache, as far as the gateway knows."""
    if turn.binding is None or turn.affinity is Affinity.HIT:
        return decision.expected_cached_tokens
    return max(decision.expected_cached_tokens, turn.binding.context_tokens)


def _recompute_cause(turn: Turn) -> str:
    """Why tokens that had been computed once were computed again. A metric label: bounded."""
    if turn.affinity is Affinity.HIT:
        return "evicted"  # at home, and the home had let it go
    return turn.moved_reason or ("failover" if turn.affinity is Affinity.FAILOVER else "prefix_gone")


def _turn_label(binding: Binding | None) -> str:
    """Bounded label of the turn's number in its session; turns count from 1."""
    if binding is None:
        return "none"
    return _TURN_LABELS[binding.num_turns] if binding.num_turns < len(_TURN_LABELS) else "10+"


def _access_line(turn: Turn, now_s: float) -> AccessLine:
    facts, decision, usage = turn.facts, turn.decision, turn.usage
    line = AccessLine(
        time=int(time.time() * 1000) / 1000,
        request_id=turn.request_id,
        api=turn.api.value,
        status=turn.status,
        duration_ms=_ms(now_s - turn.started_s),
        attempts=turn.num_attempts,
        key_source=facts.key_source.value,
        tenant=turn.tenant.name,
    )
    if facts.model is not None:
        line.model = facts.model[:100]
    if facts.session_key is not None:
        line.session = facts.session_key[:12]
    if decision is not None:
        line.backend = decision.backend_id
        line.affinity = turn.affinity.value
        line.reason = turn.moved_reason or decision.reason
        line.expected_cached_tokens = decision.expected_cached_tokens
    if turn.sent_s is not None:
        line.overhead_ms = _ms(turn.sent_s - turn.started_s)
    if turn.first_token_s is not None:
        line.ttft_ms = _ms(turn.first_token_s - turn.started_s)
    if usage is not None:
        line.prompt_tokens = usage.prompt_tokens
        line.cached_tokens = usage.cached_tokens
        line.completion_tokens = usage.completion_tokens
    if turn.error is not None:
        line.error = turn.error.code
    if turn.trace is not None:
        line.trace_id = turn.trace.trace_id
    return line


def _ms(seconds: float) -> float:
    return int(seconds * 100_000 + 0.5) / 100  # `round` takes six times as long
