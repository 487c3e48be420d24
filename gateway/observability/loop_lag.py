"""How late the event loop runs its timers: a single number that reveals blocking work anywhere."""

from __future__ import annotations

import asyncio

INTERVAL_S = 0.1
WINDOW_S = 15.0
"""The maximum covers the current window and the one before, so 15 to 30 seconds."""


class LoopLag:
    """Measures the delay of a regular timer."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._window_ends_s = 0.0
        self._worst_s = 0.0
        self._worst_before_s = 0.0

    def start(self) -> None:
        self._window_ends_s = asyncio.get_running_loop().time() + WINDOW_S
        self._wait()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def worst_s(self) -> float:
        """Return the worst recent delay. Changes nothing, so any number of scrapers may call it."""
        return max(self._worst_s, self._worst_before_s)

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + INTERVAL_S
        self._timer = loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._window_ends_s:
            self._worst_before_s, self._worst_s = self._worst_s, 0.0
            self._window_ends_s = now_s + WINDOW_S
        self._worst_s = max(self._worst_s, now_s - self._due_s)
        self._wait()
