"""Handing a drained backend's sessions over: bind the largest elsewhere and let their new homes compute
their history before the next turn asks for it.

A replay is the session's last request again, asking for one token that nobody reads. It needs the request's
bytes, so this is off by default; when on, the last request of recent sessions is kept, within a bound, in
memory only. Replays are paced, because they compete with live requests. A session that moves by itself
meanwhile is left alone: the version of its binding tells.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from gateway.errors import GatewayError, UpstreamError
from gateway.fleet.pools import UpstreamPools
from gateway.fleet.registry import Fleet, StateChange
from gateway.fleet.settings import FleetSettings
from gateway.observability.logs import log_event
from gateway.request.turn import Turn
from gateway.routing.router import Router
from gateway.sessions.store import SessionStore
from gateway.values import Api, BackendId, BackendState, Binding, RequestFacts, SessionKey

REPLAY_TIMEOUT_S = 120.0
_REPLAYABLE = frozenset((Api.CHAT, Api.COMPLETIONS, Api.MESSAGES))
_ANSWER_LIMIT_BYTES = 1024 * 1024
_PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _LastRequest:
    facts: RequestFacts
    target: str
    body: bytes


@dataclass(slots=True, kw_only=True)
class Progress:
    """Of one backend's hand-over, for the admin API."""

    planned: int = 0
    warmed: int = 0
    failed: int = 0
    is_done: bool = False


class Handover:
    """Remembers last requests and replays them. Owns one task per draining backend."""

    def __init__(
        self,
        settings: FleetSettings,
        fleet: Fleet,
        router: Router,
        sessions: SessionStore,
        pools: UpstreamPools,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._settings, self._fleet, self._router = settings, fleet, router
        self._sessions, self._pools, self._clock = sessions, pools, clock
        self._last: OrderedDict[SessionKey, _LastRequest] = OrderedDict()
        self._num_bytes = 0
        self._tasks: dict[BackendId, asyncio.Task[None]] = {}
        self.progress: dict[BackendId, Progress] = {}

    @property
    def is_enabled(self) -> bool:
        return self._settings.prewarm_sessions > 0

    def reconfigure(self, settings: FleetSettings) -> None:
        """Hand over by these settings from now on; switched off, nothing is remembered any more."""
        self._settings = settings
        if not self.is_enabled:
            self._last.clear()
            self._num_bytes = 0

    def is_running(self, backend_id: BackendId) -> bool:
        """Whether this backend's sessions are being handed over now."""
        return backend_id in self._tasks

    def remember(self, turn: Turn) -> None:
        """Keep this request as its session's last one. O(1) amortised."""
        key = turn.facts.session_key
        if key is None or not turn.facts.sets_binding or turn.api not in _REPLAYABLE:
            return
        self._forget(key)
        self._last[key] = _LastRequest(facts=turn.facts, target=turn.route.target, body=turn.sent_body)
        self._num_bytes += len(turn.sent_body)
        while self._num_bytes > self._settings.prewarm_memory_bytes:
            self._forget(next(iter(self._last)))

    def _forget(self, key: SessionKey) -> None:
        known = self._last.pop(key, None)
        if known is not None:
            self._num_bytes -= len(known.body)

    def start(self, backend_id: BackendId) -> None:
        """Hand over this backend's sessions in the background. A second call for it changes nothing."""
        if not self.is_enabled or backend_id in self._tasks:
            return
        self.progress[backend_id] = Progress()
        task = asyncio.ensure_future(self._hand_over(backend_id))
        self._tasks[backend_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(backend_id, None))

    def observe_change(self, change: StateChange) -> None:
        """Start with a backend's drain, and stop when the drain is taken back or the backend fails."""
        if change.after is BackendState.DRAINING:
            self.start(change.backend_id)
        elif change.before is BackendState.DRAINING:
            self.cancel(change.backend_id)

    def cancel(self, backend_id: BackendId) -> None:
        """The drain was taken back."""
        task = self._tasks.get(backend_id)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _hand_over(self, backend_id: BackendId) -> None:
        progress = self.progress[backend_id]
        chosen = await self._most_valuable(backend_id)
        progress.planned = len(chosen)
        for key, binding in chosen:
            if await self._warm(key, binding):
                progress.warmed += 1
            else:
                progress.failed += 1
            await asyncio.sleep(1 / self._settings.prewarm_per_s)
        progress.is_done = True
        log_event("handover_done", backend=backend_id, warmed=progress.warmed, failed=progress.failed)

    async def _most_valuable(self, backend_id: BackendId) -> list[tuple[SessionKey, Binding]]:
        """The sessions whose recomputation would cost most, of those whose last request is known."""
        found: dict[SessionKey, Binding] = {}
        cursor: str | None = None
        while True:
            rows, cursor = await self._sessions.list_by_backend(backend_id, cursor=cursor, limit=_PAGE)
            found.update((key, binding) for key, binding in rows if key in self._last)
            if cursor is None:
                break
        by_size = sorted(found.items(), key=lambda row: row[1].context_tokens, reverse=True)
        return by_size[: self._settings.prewarm_sessions]

    async def _warm(self, key: SessionKey, binding: Binding) -> bool:
        """Bind the session to its next home and compute its history there. False: it was not possible."""
        last = self._last.get(key)
        body = None if last is None else one_token_request(last.body)
        if last is None or body is None:
            return False
        try:
            decision = self._router.decide(last.facts, binding, self._clock())
        except GatewayError:
            return False
        backend = self._fleet.view.get(decision.backend_id)
        if backend is None or decision.backend_id == binding.backend_id:
            return False
        held = await self._sessions.rebind(
            key, binding.version, decision.backend_id, backend.epoch, binding.context_tokens
        )
        if held is None or held.backend_id != decision.backend_id or held.version == binding.version:
            return False
        reservation = self._router.reserve(last.facts, decision, self._clock())
        is_warm = False
        try:
            is_warm = await self._replay(decision.backend_id, last.target, body)
        finally:
            self._router.release(reservation, self._clock(), None, completed=is_warm)
        return is_warm

    async def _replay(self, backend_id: BackendId, target: str, body: bytes) -> bool:
        with contextlib.suppress(UpstreamError, TimeoutError):
            pool = self._pools.get(backend_id)
            head = self._pools.own_request_head(backend_id, "POST", target, len(body))
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                exchange = await pool.open(head, body)
                try:
                    await exchange.read(_ANSWER_LIMIT_BYTES)
                    return exchange.status == 200
                finally:
                    exchange.abort()
        return False


def one_token_request(body: bytes) -> bytes | None:
    """The same prompt, asking for one token and no stream; None for what cannot be read."""
    try:
        request = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(request, dict):
        return None
    for name in ("stream_options", "max_completion_tokens", "n", "best_of", "response_format"):
        request.pop(name, None)
    return msgspec.json.encode(request | {"max_tokens": 1, "stream": False})
