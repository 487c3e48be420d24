"""The requests under way in this process, whatever configuration each of them began with.

Held apart from the proxy because a reload puts a new proxy in the old one's place: what is under way must be
counted, waited for and ended together.
"""

from __future__ import annotations

import asyncio
import contextlib


class RequestsInFlight:
    """One task per request. The proxy adds and discards; who stops the process waits."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[object]] = set()
        self.is_ending = False  # a cancellation now means the drain deadline, not a client that left

    async def wait_idle(self, timeout_s: float) -> None:
        """Return when nothing runs any more, or after `timeout_s`; requests that begin meanwhile count."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.tasks:
                    await asyncio.wait(tuple(self.tasks))

    async def end_all(self) -> None:
        """End what still runs, at the drain deadline: streams in band, the rest with a 503."""
        self.is_ending = True
        running = tuple(self.tasks)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=1.0)
