"""Answers that have begun at a backend and not yet at the client, because nothing of them is content.

Engines send the head of a stream before they compute. While the client has nothing, another backend can still
take the request; so a head waits for content, but no longer than `limit_s`: clients and the proxies in front
of them have limits of their own. One timer serves all, because all wait equally long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.request.attempt import Attempt


class HeldAnswers:
    """In order of arrival."""

    def __init__(self, limit_s: float, let_go: Callable[[Attempt], None]) -> None:
        """`let_go` is called once for an attempt that has waited for `limit_s`."""
        self._limit_s, self._let_go = limit_s, let_go
        self._until_s: dict[Attempt, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, attempt: Attempt) -> None:
        """Hold the attempt's head. Does nothing for one that is held already."""
        if attempt not in self._until_s:
            loop = asyncio.get_running_loop()
            self._until_s[attempt] = loop.time() + self._limit_s
            if self._timer is None:
                self._timer = loop.call_later(self._limit_s, self._tick)

    def discard(self, attempt: Attempt) -> None:
        """Its head has gone, or never will."""
        self._until_s.pop(attempt, None)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        now_s = loop.time()
        for attempt in [attempt for attempt, until_s in self._until_s.items() if until_s <= now_s]:
            self.discard(attempt)
            self._let_go(attempt)
        if self._until_s and self._timer is None:
            self._timer = loop.call_at(next(iter(self._until_s.values())), self._tick)
