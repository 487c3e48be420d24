"""One request, from the first byte read to the access line. Read this file first.

    1 read       the body within limits; parse it once into `RequestFacts`; keep the received bytes
    2 look up    the session's binding (bounded by one store budget, never an error)
    3 decide     which backend: pure, explainable
    4 reserve    in-flight and prefill work there; no await between 3 and 4
    5 forward    the received bytes, and relay the answer as it comes
    6 fail over  while nothing was sent downstream: back to 3 without the backends already tried
    7 record     always and exactly once: binding, gauges, usage, one access line

Invariants. Each reservation has one owner, the `try` block of its attempt, and is released when the block
is left, however it is left: answer, error or cancellation. After the first byte downstream nothing is
retried; a stream that breaks ends with an in-band error and an unclean close. Nothing here knows how a
backend is chosen (`routing`), what bytes mean (`wire`) or how sockets behave (`upstream`, `downstream`).
"""

from __future__ import annotations

import asyncio
from typing import cast

from aiohttp import web

from gateway.downstream.relay import ClientRelay, close_response
from gateway.downstream.tunnel import tunnel
from gateway.errors import GatewayError, ShuttingDown, UpstreamError
from gateway.hedge import Hedge, may_hedge
from gateway.limits.admission import QueueTicket
from gateway.request.answer_head import answer_headers
from gateway.request.answer_observer import AnswerObserver
from gateway.request.forward import Forwarder
from gateway.request.parts import ProxyParts
from gateway.request.recorder import CLIENT_CLOSED_REQUEST
from gateway.request.turn import Turn
from gateway.routing.failover import may_try_another
from gateway.routing.health import Outcome
from gateway.routing.reservation import Reservation
from gateway.upstream.exchange import Exchange
from gateway.values import Affinity, Binding, Decision
from gateway.wire.error_bodies import stream_error
from gateway.wire.headers import find_header
from gateway.wire.routes import Route

MAX_BINDING_RACES = 3
"""How often one request may find that another bound its session first, before it goes on unpinned."""


class Proxy:
    """Serves routed requests under one configuration. Safe to call concurrently from one event loop."""

    def __init__(self, parts: ProxyParts) -> None:
        self._parts = parts
        self._clock = parts.clock
        self._tracing = parts.tracing
        self._failover = parts.config.failover
        self._admission = parts.admission
        self._has_backend_gates = parts.admission.has_backend_gates
        self.intake = parts.intake
        self._forwarder = Forwarder(parts)
        hedge_after_s = parts.config.failover.hedge_after_s
        self._hedge = None if hedge_after_s is None else Hedge(parts, self._forwarder, hedge_after_s)
        self._retries = parts.retries
        self._running = parts.in_flight.tasks

    @property
    def num_in_flight(self) -> int:
        return len(self._running)

    async def serve(self, request: web.BaseRequest, route: Route, turn: Turn) -> web.StreamResponse:
        """Answer one request. Raises GatewayError while nothing was sent; the caller renders it."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        if self._tracing is not None:
            turn.trace = self._tracing.begin(turn.api, request.method, route.path, request.raw_headers)
        try:
            self._admission.check_arrival(len(self._running))
            await self.intake.take_in(request, route, turn)  # 1
            turn.binding = await self._look_up(turn)  # 2
            if not self._admission.try_enter():
                await self._admission.wait(self._ticket(turn))
            turn.holds_place = True
            return await self._attempt_until_answered(request, turn)  # 3-6
        except GatewayError as error:
            turn.error, turn.status = error, error.status
            raise
        except ConnectionResetError:  # the client left in this very moment; its cancellation is on its way
            turn.is_client_gone = True
            return web.Response(status=CLIENT_CLOSED_REQUEST)
        except asyncio.CancelledError:
            if self._parts.in_flight.is_ending:
                task.uncancel()
                turn.error, turn.status = _leaving(), ShuttingDown.status
                raise turn.error from None
            turn.is_client_gone = True
            raise
        except Exception:
            turn.error, turn.status = GatewayError("unforeseen"), GatewayError.status
            raise
        finally:
            self._running.discard(task)
            if turn.holds_place:
                self._admission.leave()
            self.intake.settle(turn)
            await self._parts.recorder.record(turn, self._clock())  # 7

    # -- 2 look up

    async def _look_up(self, turn: Turn) -> Binding | None:
        facts, sessions = turn.facts, self._parts.sessions
        binding = None
        if facts.session_key is not None:
            binding = await sessions.get(facts.session_key, turn.store_deadline_s)
        if facts.answer_key is not None and turn.tenant.is_known:
            is_same = facts.answer_key == facts.session_key
            turn.tenant.check_answer(
                binding if is_same else await sessions.get(facts.answer_key, turn.store_deadline_s)
            )
        return binding

    def _ticket(self, turn: Turn) -> QueueTicket:
        """Follow-up turns come before new sessions: their history is computed already, and fades."""
        if turn.ticket is None:
            is_follow_up = turn.facts.is_follow_up or turn.binding is not None
            turn.ticket = self._admission.ticket(is_follow_up=is_follow_up, priority=turn.tenant.priority)
        return turn.ticket

    # -- 3 to 6

    async def _attempt_until_answered(self, request: web.BaseRequest, turn: Turn) -> web.StreamResponse:
        """Try backends until one answers. Raises the last failure when none may be tried any more."""
        self._retries.deposit()
        while True:
            decision = await self._choose(turn) if self._has_backend_gates else self._decide(turn)  # 3
            reservation = self._reserve(turn, decision)  # 4
            try:
                answer = await self._attempt(request, turn, decision, reservation)
            finally:
                self._release(turn, reservation)
            if answer is not None:
                return answer

    def _decide(self, turn: Turn) -> Decision:
        now_s = self._clock()
        return self._parts.router.decide(
            turn.facts,
            turn.binding,
            now_s,
            excluded=turn.tried,
            avoided=self._admission.avoided(now_s),
            by_ring=turn.is_store_away,
        )

    async def _choose(self, turn: Turn) -> Decision:
        """Decide, and hold a place on the chosen backend, after a wait if need be."""
        return await self._admission.choose(lambda: self._decide(turn), self._ticket(turn))

    def _reserve(self, turn: Turn, decision: Decision) -> Reservation:
        """Count in-flight and work on the chosen backend. Whoever calls this must call `_release`."""
        turn.decision, turn.affinity = decision, decision.affinity
        backend = self._parts.fleet.view.get(decision.backend_id)
        turn.epoch = backend.epoch if backend is not None else 0
        return self._parts.router.reserve(turn.facts, decision, self._clock())

    def _release(self, turn: Turn, reservation: Reservation) -> None:
        was_answered = turn.observer is not None and turn.error is None and not turn.is_client_gone
        is_from_here = turn.backend_id == reservation.backend_id  # a hedge may have been quicker
        self._parts.router.release(
            reservation, self._clock(), turn.usage, completed=was_answered and is_from_here
        )
        if self._has_backend_gates:
            self._admission.leave_backend(reservation.backend_id)

    async def _attempt(
        self, request: web.BaseRequest, turn: Turn, decision: Decision, reservation: Reservation
    ) -> web.StreamResponse | None:
        """Try the backend decided on. None: decide again."""
        if turn.num_races < MAX_BINDING_RACES and not await self._bind(turn, decision):
            turn.num_races += 1
            return None  # another request bound this session first: its home is known now
        try:
            if self._hedge is not None and may_hedge(turn.facts):
                exchange = (await self._hedge.open(request, turn, decision)).exchange
            else:
                exchange = await self._forwarder.open(request, turn, decision)  # 5
        except UpstreamError as error:
            self._forwarder.note_failure(decision.backend_id, error)
            if turn.trace is not None:
                turn.trace.fail_attempt(error)
            if not self._may_fail_over(turn, error):  # 6
                raise
            self._parts.metrics.retries[error.code] += 1.0
            turn.tried |= {decision.backend_id}
            return None
        if turn.tried:
            turn.affinity = Affinity.FAILOVER
        if exchange.status == 101:
            return await self._tunnel(request, turn, exchange)
        return await self._relay(request, turn, exchange, reservation)

    async def _bind(self, turn: Turn, decision: Decision) -> bool:
        """Make the session's home agree with the decision. False: somebody bound it elsewhere meanwhile."""
        facts, binding, backend_id = turn.facts, turn.binding, decision.backend_id
        if facts.session_key is None or not facts.sets_binding or turn.is_store_away:
            return True
        if binding is not None and binding.backend_id == backend_id and decision.affinity is Affinity.HIT:
            return True
        if binding is None:
            held = await self._parts.sessions.claim(
                facts.session_key, backend_id, turn.epoch, deadline_s=turn.store_deadline_s
            )
        else:
            held = await self._parts.sessions.rebind(
                facts.session_key,
                binding.version,
                backend_id,
                turn.epoch,
                binding.context_tokens,
                deadline_s=turn.store_deadline_s,
            )
        if held is None:
            # No store to ask. A session with a known home goes on; for any other the ring alone decides, on
            # every replica alike.
            turn.is_store_away = binding is None
            return binding is not None
        turn.binding = held
        if held.backend_id != backend_id:
            return held.backend_id in turn.tried
        if binding is not None:
            turn.moved_reason, turn.moved_from = decision.reason, binding.backend_id
        return True

    # -- 5 forward

    async def _relay(
        self, request: web.BaseRequest, turn: Turn, exchange: Exchange, reservation: Reservation
    ) -> web.StreamResponse:
        """Pass the answer on as it comes. A break is told in band: it is too late for another backend."""
        if self._parts.handover.is_enabled:
            self._parts.handover.remember(turn)
        turn.body = turn.sent_body = b""  # no attempt can follow: give the memory back before a long stream
        turn.status = exchange.status
        assert turn.decision is not None
        backend_id = turn.decision.backend_id  # the reservation's, or that of a hedge that was quicker
        is_event_stream = _is_event_stream(exchange)
        observer = self._observe(turn, exchange, reservation, is_event_stream)
        try:
            relay = ClientRelay(request, observer.feed if observer is not None else None)
            relay.send_head(
                exchange.status,
                exchange.reason,
                answer_headers(turn, exchange, is_event_stream),
                content_length=exchange.content_length,
                is_event_stream=is_event_stream,
            )
            await exchange.relay(relay)
            if exchange.status < 400:
                self._parts.fleet.observe_outcome(backend_id, Outcome.SUCCESS)
        except UpstreamError as error:
            self._forwarder.note_failure(backend_id, error)
            self._break_off(turn, relay, error, is_event_stream)
        except asyncio.CancelledError:
            if not self._parts.in_flight.is_ending:
                raise
            cast("asyncio.Task[object]", asyncio.current_task()).uncancel()
            self._break_off(turn, relay, _leaving(), is_event_stream)
        finally:
            exchange.abort()  # does nothing after a complete answer
            if observer is not None:
                observer.finish()
        return relay.response

    async def _tunnel(self, request: web.BaseRequest, turn: Turn, exchange: Exchange) -> web.StreamResponse:
        """Join client and backend until one of them ends; at the drain deadline both do."""
        turn.status = exchange.status
        try:
            return await tunnel(request, exchange, answer_headers(turn, exchange, is_event_stream=False))
        except asyncio.CancelledError:
            if not self._parts.in_flight.is_ending:
                raise
            cast("asyncio.Task[object]", asyncio.current_task()).uncancel()
            turn.error = _leaving()
            return close_response()
        finally:
            exchange.abort()  # does nothing once the tunnel has had it

    def _break_off(self, turn: Turn, relay: ClientRelay, error: GatewayError, is_event_stream: bool) -> None:
        """End a begun answer that cannot be completed: a stream says why, and nothing looks complete."""
        turn.error = error
        error.__traceback__ = None  # it leads to who holds the turn: leave no cycle to the collector
        observer = turn.observer
        is_explained = is_event_stream and not (observer is not None and observer.is_complete)
        mid_event = observer is not None and observer.is_mid_event
        relay.fail(stream_error(turn.api, error, mid_event=mid_event) if is_explained else b"")

    def _observe(
        self, turn: Turn, exchange: Exchange, reservation: Reservation, is_event_stream: bool
    ) -> AnswerObserver | None:
        """Watch successful answers for first token and usage; errors pass unread."""
        if exchange.status >= 300:
            return None

        def on_first_token() -> None:
            turn.first_token_s = self._clock()
            self._parts.router.first_token(reservation, turn.first_token_s)

        turn.observer = AnswerObserver(
            turn.api,
            is_stream=is_event_stream,
            limit_bytes=self._parts.config.limits.max_answer_observe_bytes,
            on_first_token=on_first_token,
        )
        return turn.observer

    # -- 6 fail over

    def _may_fail_over(self, turn: Turn, error: UpstreamError) -> bool:
        return (
            may_try_another(error, num_attempts=turn.num_attempts, settings=self._failover)
            and turn.decision is not None
            and self._forwarder.has_alternative(turn, turn.decision)
            and self._retries.withdraw()
        )


def _is_event_stream(exchange: Exchange) -> bool:
    return (find_header(exchange.headers, b"content-type") or b"").lower().startswith(b"text/event-stream")


def _leaving() -> ShuttingDown:
    return ShuttingDown("this gateway is shutting down; send the request again", retry_after_s=1)
