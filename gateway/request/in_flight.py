"""The requests under way in this process, whatever configuration each of them began with.

Held apart from the proxy because a reload puts a new proxy in the old one's place: what is under way must be
counted, waited for and ended together.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from gateway.errors import GatewayError, ShuttingDown
from gateway.request.turn import Turn


class TurnOwner(Protocol):
    """The proxy that serves a turn, as far as ending it goes."""

    def end(self, turn: Turn, error: GatewayError) -> None:
        """End a request that is under way: a stream in band, any other with an error answer."""


class RequestsInFlight:
    """One entry per request. The proxy adds and discards; who stops the process waits."""

    def __init__(self) -> None:
        self._owners: dict[Turn, TurnOwner] = {}
        self._idle: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, turn: Turn, owner: TurnOwner) -> None:
        self._owners[turn] = owner

    def discard(self, turn: Turn) -> bool:
        """Return whether it was in flight."""
        was_here = self._owners.pop(turn, None) is not None
        if not self._owners and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
        return was_here

    async def wait_idle(self, timeout_s: float) -> None:
        """Return when nothing runs any more, or after `timeout_s`; requests that begin meanwhile count."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._owners:
                    self._idle = asyncio.get_running_loop().create_future()
                    await self._idle

    async def end_all(self) -> None:
        """End what still runs, at the drain deadline: streams in band, the rest with a 503."""
        for turn, owner in tuple(self._owners.items()):
            message = "this gateway is shutting down; send the request again"
            owner.end(turn, ShuttingDown(message, retry_after_s=1))
        await self.wait_idle(1.0)
