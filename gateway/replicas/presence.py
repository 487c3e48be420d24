"""Which gateway processes share a session store: each tells about itself, every few seconds.

For people who look, never for decisions. A replica that has not written for `LIFETIME_S`, on the store's own
clock, is not listed any more. What is written is opaque here; its reader validates it.
"""

from __future__ import annotations

import uuid
from typing import Protocol

from gateway.redis_link.link import RedisLink, Unavailable
from gateway.redis_link.lua import load_script

LIFETIME_S = 10.0


class SharedPresence(Protocol):
    """Never raises for trouble with the store."""

    async def publish(self, report: bytes) -> list[bytes]:
        """Tell the others, and return what they told; nothing when the store is away."""
        ...


class MemoryPresence:
    """One process is all there is."""

    async def publish(self, report: bytes) -> list[bytes]:
        return []


class RedisPresence:
    """The board in Redis: the load board's script under another key, with a longer life."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._replica = uuid.uuid4().hex
        self._script = load_script("loads")

    async def publish(self, report: bytes) -> list[bytes]:
        arguments = [self._replica, report, round(LIFETIME_S * 1000)]

        async def exchange() -> object:
            return await self._link.run(self._script, [self._link.layout.replicas], arguments)

        try:
            told = await self._link.ask_patiently(0, exchange)
        except Unavailable:
            return []
        return [one for one in told if isinstance(one, bytes)] if isinstance(told, list) else []
