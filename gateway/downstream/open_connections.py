"""What all client connections of one server have in common, and the clock that watches them.

Decision: one clock for all. It compares every connection's deadlines a few times a second, and runs while
there is a connection; so a request costs no timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from gateway.downstream.head import HeadLimits
from gateway.downstream.refusal import Refusal
from gateway.downstream.request import ClientRequest, Connection
from gateway.downstream.settings import DownstreamSettings
from gateway.scheduling.rounds import rounds_of_loop

LAST_GOODBYE_S: Final = 1.0
"""How long connections that were cut off may take to be gone."""

Handler = Callable[[ClientRequest], None]


class OpenConnection(Connection, Protocol):
    """A connection, as it is watched and closed."""

    deadline_s: float
    stall_deadline_s: float

    @property
    def is_idle(self) -> bool:
        """Nothing is being served, and nothing waits to be."""

    def expire(self, now_s: float) -> None:
        """A deadline has passed."""

    def close(self) -> None:
        """Close once everything written has left."""

    def abort(self) -> None:
        """Cut it off."""


class OpenConnections:
    """Belongs to one event loop."""

    def __init__(
        self,
        handler: Handler,
        settings: DownstreamSettings,
        *,
        limit: int,
        on_refusal: Callable[[Refusal], None] | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.clock, self.rounds = self._loop.time, rounds_of_loop()
        self.handler, self.settings, self.on_refusal = handler, settings, on_refusal
        self.head_limits = HeadLimits(settings)
        self.all: set[OpenConnection] = set()
        self.is_leaving = False  # each answer ends its connection, so that clients go elsewhere
        self._limit = limit
        self._tick_s = _tick_interval_s(settings)
        self._ticker: asyncio.TimerHandle | None = None
        self._all_lost: asyncio.Future[None] | None = None

    def add(self, connection: OpenConnection) -> int:
        """Return by how many the limit is exceeded now."""
        self.all.add(connection)
        if self._ticker is None:
            self._ticker = self._loop.call_later(self._tick_s, self._tick)
        return len(self.all) - self._limit

    def discard(self, connection: OpenConnection) -> None:
        """It is lost."""
        self.all.discard(connection)
        if not self.all and self._all_lost is not None and not self._all_lost.done():
            self._all_lost.set_result(None)

    async def close(self, grace_s: float) -> None:
        """Close idle connections; let the others end for `grace_s`, then cut them off. Idempotent."""
        for connection in tuple(self.all):
            if connection.is_idle:
                connection.close()
        await self._wait_all_lost(grace_s)
        for connection in tuple(self.all):
            connection.abort()
        await self._wait_all_lost(LAST_GOODBYE_S)
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None

    async def _wait_all_lost(self, timeout_s: float) -> None:
        """Until no connection is left, or `timeout_s` has passed."""
        if self.all and timeout_s > 0:
            self._all_lost = self._loop.create_future()
            await asyncio.wait((self._all_lost,), timeout=timeout_s)

    def _tick(self) -> None:
        """Compare every connection's deadlines. O(connections)."""
        now_s = self._loop.time()
        for connection in tuple(self.all):
            if connection.deadline_s <= now_s or connection.stall_deadline_s <= now_s:
                connection.expire(now_s)
        self._ticker = self._loop.call_later(self._tick_s, self._tick) if self.all else None


def _tick_interval_s(settings: DownstreamSettings) -> float:
    """An eighth of the shortest limit, so that no limit is exceeded by more than that; at most 0.5 s."""
    shortest_s = min(
        settings.keep_alive_timeout_s,
        settings.body_idle_timeout_s,
        settings.write_stall_timeout_s,
        settings.linger_s or settings.keep_alive_timeout_s,
    )
    return min(0.5, max(0.005, shortest_s / 8))
