"""One upstream pool per backend, created when first needed and closed when the backend leaves the fleet."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.errors import UpstreamConnectFailed
from gateway.fleet.registry import Fleet
from gateway.observability.request_ids import RequestIds
from gateway.upstream.pool import UpstreamPool
from gateway.upstream.settings import UpstreamSettings
from gateway.values import BackendId, FleetView
from gateway.wire.headers import RequestHeads, bearer
from gateway.wire.settings import HeaderSettings


class UpstreamPools:
    """Looks backends up in the fleet: never connects to a name that is not in the view."""

    def __init__(self, fleet: Fleet, settings: UpstreamSettings) -> None:
        self._fleet, self._settings = fleet, settings
        self._heads = RequestHeads(HeaderSettings())
        self._ids = RequestIds()
        self._pools: dict[BackendId, UpstreamPool] = {}
        self._base_urls: dict[BackendId, str] = {}
        self._closing: set[asyncio.Task[Any]] = set()

    def __repr__(self) -> str:
        return f"<UpstreamPools for {len(self._pools)} backends, {len(self._closing)} closing>"

    def get(self, backend_id: BackendId) -> UpstreamPool:
        """Return the pool of a backend in the current view. Raises UpstreamConnectFailed for any other
        name: a backend may leave between a decision and its attempt."""
        pool = self._pools.get(backend_id)
        if pool is None:
            backend = self._fleet.view.get(backend_id)
            if backend is None:
                raise UpstreamConnectFailed(f"backend {backend_id} has left the fleet")
            pool = self._pools[backend_id] = UpstreamPool(backend.base_url, self._settings)
            self._base_urls[backend_id] = backend.base_url
        return pool

    def own_request_head(
        self, backend_id: BackendId, method: str, target: str, body_length: int | None = None
    ) -> bytes:
        """Build the head of the gateway's own request (probe, scrape, replay), with the backend's key."""
        address = self.get(backend_id).address
        api_key = self._fleet.api_key(backend_id)
        return self._heads.build(
            method,
            address.path_prefix.decode() + target,
            () if body_length is None else ((b"content-type", b"application/json"),),
            host=address.host_header.decode(),
            body_length=body_length,
            request_id=self._ids.new(),
            credential=bearer(api_key),
        )

    def sync(self, view: FleetView) -> None:
        """Close the pools whose backend has left or has another address; running answers finish."""
        for backend_id, pool in list(self._pools.items()):
            backend = view.get(backend_id)
            if backend is not None and backend.base_url == self._base_urls[backend_id]:
                continue
            del self._pools[backend_id]
            task = asyncio.ensure_future(pool.close(grace_s=self._settings.idle_timeout_s))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for task in tuple(self._closing):
            task.cancel()
        await asyncio.gather(
            *self._closing, *(pool.close() for pool in self._pools.values()), return_exceptions=True
        )
        self._pools.clear()
