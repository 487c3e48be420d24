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

from gateway.errors import shown
from gateway.observability.logs import AccessLine, AccessLog
from gateway.observability.metrics import GatewayMetrics, status_label
from gateway.request.journal import Journal
from gateway.request.made_objects import MadeObjects
from gateway.request.request_debug import debug_line
from gateway.request.tracing import RequestTrace
from gateway.request.turn import Turn
from gateway.sessions.store import SessionStore
from gateway.values import Affinity, Api, Decision
from gateway.wire.facts import FactsParser

CLIENT_CLOSED_REQUEST = 499  # nginx's number for a client that left before its answer was complete

_TURN_LABELS = ("1", "2", "3", "4", "5", "6-9", "6-9", "6-9", "6-9")


class Recorder:
    """Writes down finished turns. Owns the few background writes that a turn may leave."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        sessions: SessionStore,
        made: MadeObjects,
        parser: FactsParser,
        log: AccessLog,
        journal: Journal | None = None,
    ) -> None:
        self._metrics, self._sessions, self.log = metrics, sessions, log
        self.logs_requests = True  # each; those that an operator asked for are told anyway
        self._parser, self.made = parser, made
        self._journal = journal
        self._writes: set[asyncio.Task[Any]] = set()

    def record(self, turn: Turn, now_s: float, *, delay_s: float = 0.0) -> None:
        """Changes: metrics, the session store, the access log. The turn ended at `now_s`, `delay_s` ago."""
        if turn.outcome.is_client_gone:
            turn.outcome.status = CLIENT_CLOSED_REQUEST
        self._renew(turn)
        if turn.api is Api.RESPONSES:
            self.remember_response(turn)
        if turn.placement.objects and turn.outcome.status < 400:
            self._renew_objects(turn)
        self._count(turn, now_s)
        if turn.trace is not None:
            self._link_trace(turn, turn.trace, now_s)
        if self._journal is not None:
            self._journal.note(turn, now_s)
        if self.logs_requests:
            self.log.write(_access_line(turn, now_s, time.time() - delay_s))
        if turn.is_debug:
            self.log.write(debug_line(turn))

    async def close(self) -> None:
        """Wait for background writes; each is bounded by the store's own budget."""
        if self._writes:
            await asyncio.gather(*self._writes, return_exceptions=True)

    def _renew(self, turn: Turn) -> None:
        """Keep the session alive and remember how long its context has grown.

        Requests that cannot bind, such as counts of tokens and titles, are no turns and tell nothing of it.
        """
        placement, outcome = turn.placement, turn.outcome
        facts, binding, usage = turn.facts, placement.binding, outcome.usage
        if binding is None or facts.session_key is None or outcome.observer is None:
            return
        context_tokens = binding.context_tokens
        if facts.sets_binding and usage is not None and usage.prompt_tokens is not None:
            context_tokens = usage.prompt_tokens + (usage.completion_tokens or 0)
        num_turns = binding.num_turns + facts.sets_binding
        self._sessions.renew(facts.session_key, binding, context_tokens=context_tokens, num_turns=num_turns)

    def _renew_objects(self, turn: Turn) -> None:
        place = turn.route.place
        if place is not None and place.action == "" and turn.request.method == "DELETE":
            self._spawn(self.made.forget(turn))
        else:
            self.made.renew(turn)

    def remember_response(self, turn: Turn) -> None:
        """A request that names this answer must come to the backend that has it, also while it runs.

        Does nothing while its id is unknown, or when it is remembered.
        """
        placement, outcome = turn.placement, turn.outcome
        response_id = outcome.observer.response_id if outcome.observer is not None else None
        if response_id and placement.decision is not None and outcome.remembered_id != response_id:
            outcome.remembered_id = response_id
            key = self._parser.response_session_key(turn.tenant.name, response_id)
            self._spawn(self._sessions.claim(key, placement.decision.backend_id, placement.epoch))

    def _spawn(self, write: Coroutine[Any, Any, object]) -> None:
        task = asyncio.ensure_future(write)
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    def _count(self, turn: Turn, now_s: float) -> None:
        placement, outcome = turn.placement, turn.outcome
        metrics, api = self._metrics, turn.api._value_  # `value` of an Enum member is Python code
        metrics.requests[api, status_label(outcome.status), outcome.result._value_] += 1.0
        metrics.duration.observe(now_s - turn.started_s, api)
        if outcome.is_client_gone:
            metrics.client_gone[api] += 1.0
        if outcome.error is not None:
            metrics.errors[outcome.error.source, outcome.error.code] += 1.0
        waited_s = placement.waited_s
        if waited_s > 0.0:
            metrics.queue_wait.observe(waited_s)
        if placement.decision is None:
            return
        metrics.affinity[placement.affinity._value_, turn.facts.key_source._value_] += 1.0
        if placement.moved_reason is not None:
            metrics.moves[placement.moved_reason] += 1.0
        if outcome.sent_s is not None:
            metrics.overhead.observe(outcome.sent_s - turn.started_s - waited_s)
        turn_label = _turn_label(turn)
        if outcome.first_token_s is not None:
            metrics.time_to_first_token.observe(outcome.first_token_s - turn.started_s, turn_label)
        if outcome.observer is not None:
            self._count_tokens(turn, placement.decision, turn_label, now_s)

    def _count_tokens(self, turn: Turn, decision: Decision, turn_label: str, now_s: float) -> None:
        """A share is only honest when both of its numbers are known for the same requests."""
        outcome = turn.outcome
        metrics, usage, backend_id = self._metrics, outcome.usage, decision.backend_id
        if usage is None or usage.prompt_tokens is None:
            metrics.usage_unknown["usage"] += 1.0
            return
        num_generated = usage.completion_tokens or 0
        metrics.completion_tokens[backend_id] += num_generated
        if outcome.first_token_s is not None and num_generated > 1 and outcome.error is None:
            metrics.inter_token.observe((now_s - outcome.first_token_s) / (num_generated - 1))
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
        outcome = turn.outcome
        trace.finish(turn)
        if trace.trace_id is None:
            return
        metrics, wall_s = self._metrics, time.time()
        metrics.duration.remember(now_s - turn.started_s, turn.api.value, trace.trace_id, wall_s)
        if outcome.first_token_s is not None:
            ttft_s = outcome.first_token_s - turn.started_s
            metrics.time_to_first_token.remember(ttft_s, _turn_label(turn), trace.trace_id, wall_s)


def _known_tokens(turn: Turn, decision: Decision) -> int:
    """How much of the prompt was in some backend's cache, as far as the gateway knows."""
    if turn.placement.binding is None or turn.placement.affinity is Affinity.HIT:
        return decision.expected_cached_tokens
    return max(decision.expected_cached_tokens, turn.placement.binding.context_tokens)


def _recompute_cause(turn: Turn) -> str:
    """Why tokens that had been computed once were computed again. A metric label: bounded."""
    if turn.placement.affinity is Affinity.HIT:
        return "evicted"  # at home, and the home had let it go
    return turn.placement.moved_reason or (
        "failover" if turn.placement.affinity is Affinity.FAILOVER else "prefix_gone"
    )


def _turn_label(turn: Turn) -> str:
    """Bounded label of the turn's number in its session; turns count from 1, and helper requests are none."""
    binding = turn.placement.binding
    if binding is None or not turn.facts.sets_binding:
        return "none"
    return _TURN_LABELS[binding.num_turns] if binding.num_turns < len(_TURN_LABELS) else "10+"


def _access_line(turn: Turn, now_s: float, wall_s: float) -> AccessLine:
    placement, outcome = turn.placement, turn.outcome
    facts, decision, usage = turn.facts, placement.decision, outcome.usage
    line = AccessLine(
        time=int(wall_s * 1000) / 1000,
        request_id=turn.request_id,
        api=turn.api.value,
        status=outcome.status,
        outcome=outcome.result.value,
        duration_ms=_ms(now_s - turn.started_s),
        attempts=placement.num_attempts,
        key_source=facts.key_source.value,
        tenant=turn.tenant.name,
    )
    if turn.engine_request_id != turn.request_id:
        line.engine_request_id = turn.engine_request_id
    if facts.model is not None:
        line.model = shown(facts.model)
    if facts.session_key is not None:
        line.session = facts.session_key[:12]
    if decision is not None:
        line.backend = decision.backend_id
        line.affinity = placement.affinity.value
        line.reason = placement.moved_reason or decision.reason
        line.expected_cached_tokens = decision.expected_cached_tokens
    if outcome.sent_s is not None:
        line.overhead_ms = _ms(outcome.sent_s - turn.started_s)
    if outcome.first_token_s is not None:
        line.ttft_ms = _ms(outcome.first_token_s - turn.started_s)
    if usage is not None:
        line.prompt_tokens = usage.prompt_tokens
        line.cached_tokens = usage.cached_tokens
        line.completion_tokens = usage.completion_tokens
    if outcome.error is not None:
        line.error = outcome.error.code
    if turn.trace is not None:
        line.trace_id = turn.trace.trace_id
    return line


def _ms(seconds: float) -> float:
    return int(seconds * 100_000 + 0.5) / 100  # `round` takes six times as long
