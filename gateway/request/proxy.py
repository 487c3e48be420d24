"""One request, from the first byte read to the access line. Read this file first.

    1 read       the body within limits; parse it once into `RequestFacts`; keep the received bytes
    2 look up    the session's binding (bounded by one store budget, never an error)
    3 decide     which backend: pure, explainable
    4 reserve    in-flight and prefill work there; nothing is awaited between 3 and 4
    5 forward    the received bytes, and relay the answer as it comes
    6 fail over  while nothing was sent to the client: back to 3 without the backends already tried
    7 record     always and exactly once: binding, gauges, usage, one access line

Each step is a plain call over the `Turn`. The turns that can go on take their steps together, in rounds: all
take one step, then all the next (see `scheduling.rounds`). A step that has to wait (for the rest of the body,
the store, a connection, a place) returns a coroutine that completes it in a task; then the turn joins the
next round. An ordinary turn of a bound session needs neither task nor future.

Invariants. A reservation is held from step 4 until the attempt has ended, however it ends. After the first
byte downstream nothing is retried; a stream that breaks ends with an in-band error and an unclean close.
`_finish` runs once per turn. Nothing here knows how a backend is chosen (`routing`), what bytes mean (`wire`)
or how sockets behave (`upstream`, `downstream`).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from gateway.downstream.relay import ClientRelay
from gateway.downstream.tunnel import tunnel
from gateway.errors import GatewayError, Overloaded, UpstreamError
from gateway.request.answer_observer import AnswerObserver
from gateway.request.attempt import Attempt
from gateway.request.fail_over import FailOver
from gateway.request.forward import Forwarder, NotYetKnown, answer_headers, is_event_stream
from gateway.request.held_answers import HeldAnswers
from gateway.request.object_lists import ObjectLists
from gateway.request.parts import ProxyParts
from gateway.request.placing import PLACE_STEP, Placer
from gateway.request.refuse import log_fault, refuse
from gateway.request.spending import max_prompt_tokens
from gateway.request.turn import Parked, Turn, Waiting, nothing_waits
from gateway.scheduling.rounds import Stage, rounds_of_loop
from gateway.upstream.pool import UpstreamPool
from gateway.values import Affinity, Api
from gateway.wire.bodies import is_background
from gateway.wire.error_bodies import stream_error

WAITING: Final = -1
"""In place of a turn's next step: a task has the turn."""
ENDED: Final = -2
_UNOBSERVED: Final = (Api.OBJECTS.value, Api.MESSAGE_BATCHES.value)
"""Their answers are descriptions and contents, whatever these look like."""


class Proxy:
    """Serves routed requests under one configuration. Belongs to one event loop."""

    def __init__(self, parts: ProxyParts) -> None:
        self._parts = parts
        self._clock, self._tracing = parts.clock, parts.tracing
        self._in_flight, self._ledger = parts.in_flight, parts.ledger
        self.intake, self._forwarder, self._placer = parts.intake, Forwarder(parts), Placer(parts)
        self.lists = ObjectLists(parts)
        placer, self._made = self._placer, parts.recorder.made
        self._steps = (
            self.intake.read,
            placer.look_up,
            placer.admit,
            placer.place,
            placer.bind,
            self._prepare,
            self._send,
        )
        assert self._steps[PLACE_STEP] == placer.place
        self._holds_answers = parts.config.failover.hold_s > 0.0
        self._held = HeldAnswers(parts.config.failover.hold_s, self._let_go)
        self._failing = FailOver(parts, self._forwarder, placer, self._held)
        self._ready: list[Turn] = []  # to take steps in the next round
        self._complete: list[Turn] = []  # answered in this one

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def serve(self, turn: Turn) -> None:
        """Answer one request through `turn.request`, now or later. Never raises."""
        self._in_flight.add(turn, self)
        turn.request.on_gone, turn.resume = partial(self.leave, turn), partial(self._go_on, turn)
        if self._tracing is not None:
            request = turn.request
            turn.trace = self._tracing.begin(turn.api, request.method, turn.route.path, request.raw_headers)
        try:
            self._parts.admission.check_arrival(len(self._in_flight))
        except Overloaded as error:
            self._refuse(turn, error)
        else:
            self._go_on(turn)

    # -- taking steps

    def _go_on(self, turn: Turn) -> None:
        """Have the turn take the steps that are left, as far as they go without waiting."""
        if not self._ready:
            rounds_of_loop().add(Stage.TURNS, self._advance)
        self._ready.append(turn)

    def _advance(self) -> None:
        """Have all turns that are ready take a step, then the next."""
        turns, self._ready = self._ready, []
        for number, step in enumerate(self._steps):
            for turn in turns:
                if turn.step == number:
                    turn.step = number + 1
                    try:
                        waiting = step(turn)
                    except Exception as error:
                        self._refuse(turn, error)
                    else:
                        if waiting is not None:
                            self._wait_for(turn, waiting)

    def _wait_for(self, turn: Turn, waiting: Waiting | Parked) -> None:
        """A step is not complete: it is taken again after a pause, or ends in a task."""
        if isinstance(waiting, Parked):
            turn.step -= 1
        else:
            turn.step, next_step = WAITING, turn.step
            task = turn.task = asyncio.get_running_loop().create_task(self._wait(turn, waiting, next_step))
            task.add_done_callback(partial(self._on_waited, turn, waiting))

    async def _wait(self, turn: Turn, waiting: Waiting, next_step: int) -> None:
        try:
            await waiting
        except Exception as error:
            self._refuse(turn, error)
        else:
            if turn.step == WAITING:
                turn.step = next_step
            self._go_on(turn)

    def _on_waited(self, turn: Turn, waiting: Waiting, task: asyncio.Task[None]) -> None:
        if turn.task is task:
            turn.task = None
        if task.cancelled():
            waiting.close()  # it may never have begun
            if turn.outcome.is_client_gone:
                self._finish(turn)
            else:
                assert turn.outcome.error is not None, "only `leave` and `end` cancel"
                self._refuse(turn, turn.outcome.error)

    # -- 5 forward

    def _prepare(self, turn: Turn) -> None:
        attempt = turn.attempt = Attempt(self, turn)
        try:
            self._forwarder.prepare(turn, attempt)
        except UpstreamError as error:  # the backend has just been removed
            self._failing.fail_attempt(turn, error)
            self._go_on(turn)

    def _send(self, turn: Turn) -> Waiting | None:
        attempt = turn.attempt
        assert attempt is not None
        assert attempt.pool is not None
        if attempt.pool.start_on_idle(
            attempt, attempt.request_head, turn.sent_body, is_head_request=turn.request.method == "HEAD"
        ):
            return None
        return self._dial(turn, attempt.pool, attempt)

    async def _dial(self, turn: Turn, pool: UpstreamPool, attempt: Attempt) -> None:
        """Send the request on a new connection. Back to step 3 when there is none to be had."""
        try:
            connection = await pool.connect()
        except UpstreamError as error:
            self._failing.fail_attempt(turn, error)
        else:
            connection.start(
                attempt, attempt.request_head, turn.sent_body, is_head_request=turn.request.method == "HEAD"
            )

    def on_head(self, turn: Turn, attempt: Attempt) -> None:
        """The backend's head: the end of HTTP, or of an answer that may become the client's."""
        if attempt.status == 101:
            self._wait_for(turn, self._tunnel(turn, attempt))
        elif attempt.status < 300 and turn.api._value_ not in _UNOBSERVED:
            attempt.is_event_stream = is_event_stream(attempt)
            attempt.observer = turn.outcome.observer = self._observe(turn, attempt.is_event_stream)
        if not attempt.is_event_stream:
            attempt.usage_filter = None

    def on_held(self, turn: Turn, attempt: Attempt, is_last: bool) -> None:
        """Pass the answer on from its first content; before that another backend may take the request."""
        if attempt.status == 404 and turn.placement.is_asking and self._failing.ask_next(turn):
            self._go_on(turn)
            return
        try:
            error = self._forwarder.judge(turn, attempt, is_last=is_last)
        except NotYetKnown:
            if self._holds_answers:
                self._held.add(attempt)
                return
            error = None
        self._held.discard(attempt)
        if error is not None and self._failing.take_retry(turn, error):
            attempt.abort()
            self._failing.give_up(turn, error)
            self._go_on(turn)
        elif turn.route.place is not None and self._made.must_see(turn, attempt):
            if is_last:
                self._wait_for(turn, self._publish(turn, attempt))
        else:
            self._begin_answer(turn, attempt, is_last=is_last)

    async def _publish(self, turn: Turn, attempt: Attempt) -> None:
        """Others can ask for what the answer describes before the client can."""
        await self._made.publish(turn, attempt)
        self._begin_answer(turn, attempt, is_last=True)

    def _let_go(self, attempt: Attempt) -> None:
        """An answer has been held for long enough."""
        if attempt.turn is not None and attempt.relay is None:
            self._begin_answer(attempt.turn, attempt, is_last=False)

    def _begin_answer(self, turn: Turn, attempt: Attempt, *, is_last: bool) -> None:
        """Pass the answer on as it comes. A break is told in band: it is too late for another backend."""
        if self._parts.handover.is_enabled:
            self._parts.handover.remember(turn)
        turn.body = turn.sent_body = attempt.request_head = b""  # no attempt can follow: free a large body
        self._note_answered_by(turn, attempt)
        if turn.api is Api.RESPONSES:
            self._parts.recorder.remember_response(turn)  # others may ask for it while it runs
        relay = ClientRelay(turn.request)
        relay.send_head(
            attempt.status,
            attempt.reason,
            answer_headers(turn, attempt, attempt.is_event_stream),
            content_length=attempt.content_length if attempt.usage_filter is None else None,
            is_event_stream=attempt.is_event_stream,
        )
        relay.attach(attempt)
        attempt.begin(relay, is_last=is_last)

    def _note_answered_by(self, turn: Turn, attempt: Attempt) -> None:
        turn.outcome.status, turn.outcome.is_begun = attempt.status, True
        if turn.placement.tried:
            turn.placement.affinity = Affinity.FAILOVER

    def _observe(self, turn: Turn, is_stream: bool) -> AnswerObserver:
        """Watch a successful answer for content, usage and errors; others pass unread."""
        observer = AnswerObserver(
            turn.api,
            is_stream=is_stream,
            limit_bytes=self._parts.config.limits.max_answer_observe_bytes,
            on_first_token=partial(self._on_first_token, turn) if is_stream else None,
            max_prompt_tokens=max_prompt_tokens(turn),
        )
        if turn.api is Api.RESPONSES and is_background(turn.body):
            observer.take_openings_for_content()
        return observer

    def _on_first_token(self, turn: Turn) -> None:
        now_s = turn.outcome.first_token_s = self._clock()
        if turn.placement.reservation is not None:
            self._parts.router.first_token(turn.placement.reservation, now_s)

    def on_complete(self, turn: Turn) -> None:
        """The last byte is on its way to the client. The turn ends in this round."""
        if not self._complete:
            rounds_of_loop().add(Stage.ENDS, self._end_complete)
        self._complete.append(turn)

    def _end_complete(self) -> None:
        turns, self._complete = self._complete, []
        for turn in turns:
            self._finish(turn)

    async def _tunnel(self, turn: Turn, attempt: Attempt) -> None:
        """Join client and backend until one of them ends; at the drain deadline both do."""
        self._note_answered_by(turn, attempt)
        try:
            await tunnel(turn.request, attempt, answer_headers(turn, attempt, is_stream=False))
        except asyncio.CancelledError:
            pass  # by `leave` or `end`, which have noted why
        except ConnectionResetError:
            turn.outcome.is_client_gone = True
        except UpstreamError as error:
            turn.outcome.error = error
        finally:
            attempt.abort()  # does nothing once the tunnel has had it
        self._finish(turn)

    # -- 6 fail over

    def on_failure(self, turn: Turn, attempt: Attempt, error: UpstreamError) -> None:
        """The connection to the backend is gone before the answer was complete."""
        if attempt.relay is not None:
            self._forwarder.note_failure(turn, error)
            self._break_off(turn, attempt.relay, error)
        elif self._failing.is_only_stale(turn, error):
            again = turn.attempt = Attempt(self, turn)
            again.may_upgrade, again.request_head = attempt.may_upgrade, attempt.request_head
            again.usage_filter = attempt.usage_filter
            self._wait_for(turn, self._send_again(turn, again))
        else:
            self._fail_over(turn, error)

    async def _send_again(self, turn: Turn, attempt: Attempt) -> None:
        """The backend had closed a connection that was being used again: take a fresh one to it."""
        assert turn.backend_id is not None
        try:
            pool = self._parts.pools.get(turn.backend_id)
        except UpstreamError as error:  # the backend has just been removed
            self._failing.fail_attempt(turn, error)
        else:
            pool.note_stale()
            await self._dial(turn, pool, attempt)

    def _fail_over(self, turn: Turn, error: UpstreamError) -> None:
        try:
            self._failing.fail_attempt(turn, error)
        except GatewayError as refusal:
            self._refuse(turn, refusal)
        else:
            self._go_on(turn)

    # -- ends before its time

    def leave(self, turn: Turn) -> None:
        """The client has gone: stop the backend's work."""
        turn.outcome.is_client_gone = True
        if not self._cancel(turn):
            self._finish(turn)

    def end(self, turn: Turn, error: GatewayError) -> None:
        """End a request at the drain deadline: a begun answer in band, any other with an error answer."""
        turn.outcome.error = error
        attempt = turn.attempt
        if self._cancel(turn):
            return
        if attempt is None or attempt.relay is None:
            self._refuse(turn, error)
        elif attempt.turn is not None:  # else it has just been answered
            self._break_off(turn, attempt.relay, error)

    def _cancel(self, turn: Turn) -> bool:
        """Cancel the task that has the turn, which then ends it. False: none has it (or has it any more)."""
        return turn.task is not None and turn.task.cancel()

    def on_fault(self, turn: Turn, error: Exception) -> None:
        """A fault of our own in a callback of the backend's connection."""
        attempt = turn.attempt
        if attempt is not None and attempt.relay is not None:
            log_fault(turn.request_id, error)
            self._break_off(turn, attempt.relay, GatewayError("internal error of the gateway"))
        else:
            self._refuse(turn, error)

    def _break_off(self, turn: Turn, relay: ClientRelay, error: GatewayError) -> None:
        """End a begun answer that cannot be completed: a stream says why, and nothing looks complete."""
        turn.outcome.error = error
        error.forget_origin()
        observer = turn.outcome.observer
        is_explained = relay.is_event_stream and not (observer is not None and observer.is_complete)
        mid_event = observer is not None and observer.is_mid_event
        turn.request.on_gone = None
        relay.fail(stream_error(turn.api, error, mid_event=mid_event) if is_explained else b"")
        self._finish(turn)

    def _refuse(self, turn: Turn, error: Exception) -> None:
        """Answer with an error: nothing has been sent to the client."""
        if isinstance(error, ConnectionResetError):
            turn.outcome.is_client_gone = True  # in this very moment
            self._finish(turn)
            return
        if not isinstance(error, GatewayError):
            log_fault(turn.request_id, error)
            error = GatewayError("internal error of the gateway")
        error.forget_origin()
        turn.outcome.error, turn.outcome.status = error, error.status
        self._finish(turn)
        refuse(turn.request, turn.api, error, turn.request_id, turn.cors_headers)

    # -- 7 record

    def _finish(self, turn: Turn) -> None:
        """Give back what the turn holds, and have written down what became of it. Does so once."""
        if not self._in_flight.discard(turn):
            return
        attempt, turn.attempt = turn.attempt, None
        if attempt is not None:
            self._held.discard(attempt)
            attempt.abort()  # does nothing after a complete answer
        self._forwarder.note_end(turn)
        turn.request.on_gone, turn.resume, turn.step = None, nothing_waits, ENDED
        self._placer.leave(turn)
        self._ledger.end(turn)
        self.intake.settle(turn)
