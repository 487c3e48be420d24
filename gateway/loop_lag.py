"""How late the event loop runs what is due: the one number that shows blocking work anywhere."""

from __future__ import annotations

import asyncio

INTERVAL_S = 0.1


class LoopLag:
    """Measures lateness of a regular timer. `take_worst_s` gives the worst since it was last asked."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._worst_s = 0.0

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + INTERVAL_S
        self._timer = loop.call_at(self._due_s, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take_worst_s(self) -> float:
        """Changes: forgets what it returns."""
        worst_s, self._worst_s = self._worst_s, 0.0
        return worst_s

    def _tick(self) -> None:
        self._worst_s = max(self._worst_s, asyncio.get_running_loop().time() - self._due_s)
        self.start()
