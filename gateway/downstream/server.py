"""The server of the data listener: makes a connection for each accepted socket, and closes them all."""

from __future__ import annotations

import resource
from collections.abc import Callable, Collection
from typing import Final

from gateway.downstream.connection import ClientConnection
from gateway.downstream.open_connections import Handler, OpenConnection, OpenConnections
from gateway.downstream.refusal import Refusal
from gateway.downstream.settings import DownstreamSettings

RESERVED_DESCRIPTORS: Final = 64
"""For listeners, logs, the store, probes of a middling fleet."""


class ClientServer:
    """A protocol factory for asyncio's servers. Belongs to one event loop."""

    def __init__(
        self,
        handler: Handler,
        settings: DownstreamSettings,
        *,
        on_refusal: Callable[[Refusal], None] | None = None,
    ) -> None:
        """`handler` is called once per request and must not block; it answers then, or later.

        `on_refusal` is told of each request that got no answer of the handler's: unparsable, or a failure.
        """
        limit = settings.max_connections or _room_for_connections()
        self._open = OpenConnections(handler, settings, limit=limit, on_refusal=on_refusal)

    def __call__(self) -> ClientConnection:
        return ClientConnection(self._open)

    @property
    def connections(self) -> Collection[OpenConnection]:
        """Those that are open."""
        return self._open.all

    def leave(self) -> None:
        """From now on each answer says that it is the last one on its connection, and is."""
        self._open.is_leaving = True

    async def close(self, *, grace_s: float = 0.0) -> None:
        """Close idle connections; let the others end for `grace_s`, then cut them off. Idempotent."""
        self.leave()
        await self._open.close(grace_s)


def _room_for_connections() -> int:
    """Half of the descriptors that this process may still open: a request needs one on each side."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return 1 << 20
    return max(16, (soft_limit - RESERVED_DESCRIPTORS) // 2)
