"""Which gateway processes share a session store: each publishes a report about itself every few seconds.

For operators to look at, never for decisions. A replica that has not written for `LIFETIME_S`, by the
server's clock, is no longer listed. The reports are opaque here; the reader validates them.
"""

from __future__ import annotations

import uuid
from typing import Protocol

from gateway.redis_link.link import RedisLink, Unavailable
from gateway.redis_link.lua import load_script

LIFETIME_S = 10.0


class SharedPresence(Protocol):
    """Never raises when Redis fails."""

    async def publish(self, report: bytes) -> list[bytes]:
        """Publish this replica's report and return those of the others, none if Redis is unavailable."""
        ...


class MemoryPresence:
    """A single process: there are no others."""

    async def publish(self, report: bytes) -> list[bytes]:
        return []


class RedisPresence:
    """Presence in Redis: the script of `loads.py` with another key and a longer lifetime."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._replica = uuid.uuid4().hex
        self._script = load_script("loads")

    async def publish(self, report: bytes) -> list[bytes]:
        arguments = [self._replica, report, round(LIFETIME_S * 1000)]

        async def exchange() -> object:
            return await self._link.run(self._script, [self._link.layout.replicas], arguments)

        try:
            reports = await self._link.ask_patiently(0, exchange)
        except Unavailable:
            return []
        return [other for other in reports if isinstance(other, bytes)] if isinstance(reports, list) else []
