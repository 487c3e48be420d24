"""Asking a second backend when the first stays silent: the first response head wins, the other is aborted.

Only for requests that any backend answers alike and none remembers: no session, no stream, nothing generated.
A second attempt costs the fleet work, so it is taken from the retry budget, and only after a time in which
nearly all answers come (Dean and Barroso, "The Tail at Scale", 2013).

Invariant: whatever happens, one exchange at most is left, and the second attempt's reservation is given back.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from aiohttp import web

from gateway.errors import GatewayError, NoBackend, UpstreamError
from gateway.request.forward import Forwarder
from gateway.request.parts import ProxyParts
from gateway.request.turn import Turn
from gateway.upstream.exchange import Exchange
from gateway.values import Api, Decision, RequestFacts

_REPEATABLE: Final = frozenset({Api.EMBEDDINGS.value, Api.RERANK.value, Api.TOKENIZE.value})


def may_hedge(facts: RequestFacts) -> bool:
    """Whether two backends may be asked the same."""
    return facts.session_key is None and not facts.is_stream and facts.api._value_ in _REPEATABLE


class Opened(NamedTuple):
    """An attempt whose head has come."""

    exchange: Exchange
    decision: Decision


class Hedge:
    """Opens exchanges with a second backend in reserve."""

    def __init__(self, parts: ProxyParts, forwarder: Forwarder, after_s: float) -> None:
        self._parts, self._forwarder, self._after_s = parts, forwarder, after_s

    async def open(self, request: web.BaseRequest, turn: Turn, decision: Decision) -> Opened:
        """Return the head that comes first. Raises what the first attempt raised when none comes.

        Changes the turn: its decision is the winner's. Safe to cancel.
        """
        tasks = [asyncio.ensure_future(self._open_first(request, turn, decision))]
        winner: asyncio.Task[Opened] | None = None
        try:
            await asyncio.wait(tasks, timeout=self._after_s)
            if not tasks[0].done():
                tasks.append(asyncio.ensure_future(self._open_second(request, turn, decision)))
            pending = set(tasks)
            while pending and winner is None:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                winner = next((task for task in tasks if task.done() and task.exception() is None), None)
            opened = (winner or tasks[0]).result()
            turn.decision = opened.decision
            if winner is not tasks[0] and tasks[0].done():
                self._note_failure(turn, decision, tasks[0].exception())
            return opened
        finally:
            for task in tasks:
                if task is not winner:
                    task.cancel()
                    task.add_done_callback(_abort)  # not awaited: a cancellation then would lose the winner

    async def _open_first(self, request: web.BaseRequest, turn: Turn, decision: Decision) -> Opened:
        return Opened(await self._forwarder.open(request, turn, decision), decision)

    async def _open_second(self, request: web.BaseRequest, turn: Turn, first: Decision) -> Opened:
        """Its reservation lasts until its head: of these requests little is left then."""
        parts, now_s = self._parts, self._parts.clock()
        spared = parts.admission.avoided(now_s) | {first.backend_id}
        decision = parts.router.decide(turn.facts, None, now_s, excluded=turn.tried, avoided=spared)
        if decision.backend_id == first.backend_id or not parts.retries.withdraw():
            raise NoBackend("there is no second backend to ask")
        if not parts.admission.try_enter_backend(decision.backend_id):
            raise NoBackend("the second backend is full")
        reservation = parts.router.reserve(turn.facts, decision, now_s)
        parts.metrics.retries["hedged"] += 1.0
        try:
            return Opened(await self._forwarder.open(request, turn, decision), decision)
        except UpstreamError as error:
            self._note_failure(turn, decision, error)
            raise
        finally:
            parts.router.release(reservation, parts.clock(), None, completed=False)
            parts.admission.leave_backend(decision.backend_id)

    def _note_failure(self, turn: Turn, decision: Decision, error: BaseException | None) -> None:
        if isinstance(error, UpstreamError):
            self._forwarder.note_failure(decision.backend_id, error)
            turn.tried |= {decision.backend_id}


def _abort(loser: asyncio.Task[Opened]) -> None:
    """Close what a task brought that was not wanted any more."""
    if loser.cancelled():
        return
    error = loser.exception()
    if error is None:
        loser.result().exchange.abort()
    elif not isinstance(error, GatewayError):
        raise error  # a bug: the event loop logs it
