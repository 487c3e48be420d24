"""The server of the data listener: makes the connections, watches their deadlines, closes them.

Decision: one clock for all of them. It compares every connection's deadline a few times a second, and runs while
there is a connection; so a request costs no timer.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Collection
from typing import Final

from gateway.downstream.connection import ClientConnection, Handler, OpenConnections
from gateway.downstream.refusal import Refusal
from gateway.downstream.settings import DownstreamSettings

RESERVED_DESCRIPTORS: Final = 64
"""For listeners, logs, the store, probes of a middling fleet."""

LAST_GOODBYE_S: Final = 1.0
"""How long connections that were cut off may take to be gone."""


class ClientServer:
    """Called for each accepted socket. Belongs to one event loop."""

    def __init__(
        self,
        handler: Handler,
        settings: DownstreamSettings,
        *,
        on_refusal: Callable[[Refusal], None] | None = None,
    ) -> None:
        """`handler` is called once per request and must not block. `on_refusal` is told of each request that
        got no answer of the handler's: unparsable, or a failure."""
        self._loop = asyncio.get_running_loop()
        self._open = OpenConnections(
            handler,
            settings,
            limit=settings.max_connections or _room_for_connections(),
            on_refusal=on_refusal,
            clock=self._loop.time,
        )
        self._open.watch(self._on_count)
        self._tick_s = _tick_interval_s(settings)
        self._ticker: asyncio.TimerHandle | None = None
        self._all_lost: asyncio.Future[None] | None = None

    def __call__(self) -> ClientConnection:
        return ClientConnection(self._open)

    @property
    def connections(self) -> Collection[ClientConnection]:
        """Those that are open."""
        return self._open.all

    def leave(self) -> None:
        """From now on each answer says that it is the last one on its connection, and is."""
        self._open.is_leaving = True

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Close idle connections; let the others end for `grace_s`, then cut them off. Idempotent."""
        self.leave()
        for connection in tuple(self._open.all):
            if connection.is_idle:
                connection.close()
        await self._wait_all_lost(grace_s)
        for connection in tuple(self._open.all):
            connection.abort()
        await self._wait_all_lost(LAST_GOODBYE_S)
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None

    async def _wait_all_lost(self, timeout_s: float) -> None:
        """Until no connection is left, or `timeout_s` has passed."""
        if self._open.all and timeout_s > 0:
            self._all_lost = self._loop.create_future()
            await asyncio.wait((self._all_lost,), timeout=timeout_s)

    def _on_count(self, count: int) -> None:
        if count and self._ticker is None:
            self._ticker = self._loop.call_later(self._tick_s, self._tick)
        elif not count and self._all_lost is not None and not self._all_lost.done():
            self._all_lost.set_result(None)

    def _tick(self) -> None:
        """Compare every connection's deadlines. O(connections)."""
        now_s = self._loop.time()
        for connection in tuple(self._open.all):
            if connection.deadline_s <= now_s or connection.stall_deadline_s <= now_s:
                connection.expire(now_s)
        self._ticker = self._loop.call_later(self._tick_s, self._tick) if self._open.all else None


def _tick_interval_s(settings: DownstreamSettings) -> float:
    """An eighth of the shortest limit, so that no limit is exceeded by more than that; at most 0.5 s."""
    shortest_s = min(
        settings.keep_alive_timeout_s,
        settings.body_idle_timeout_s,
        settings.write_stall_timeout_s,
        settings.linger_s or 1.0,
    )
    return min(0.5, max(0.005, shortest_s / 8))


def _room_for_connections() -> int:
    """Half of the descriptors that this process may still open: a request needs one on each side."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return 1 << 20
    return max(16, (soft_limit - RESERVED_DESCRIPTORS) // 2)
