"""Discovery: keeps the fleet in sync with sources that list the engines.

Each source is asked every few seconds. A backend that appears in its answer is added, one that disappears is
removed: running answers finish, sessions move at their next turn. The important rules concern failures:

* A source that fails changes nothing, and an empty answer is a failure: an outage of DNS or of the Kubernetes
  API must not empty the fleet. Probes find backends that are really gone; they stay listed as down until the
  source names others.
* Only changes in a source's own answer count, and what the configuration or an operator added is never
  touched. Operators' orders stand above sources: a backend that was removed and is found again stays away.
* One backend, one entry: what is in the fleet already, by id or by address, is not added again, and a source
  changes and removes only what it has added.

Knows nothing of health. Each replica asks for itself; they agree because the sources do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from gateway.fleet.discovery_sources import Source, SourceUnavailable
from gateway.fleet.registry import Fleet
from gateway.fleet.settings import BackendSettings, normalise_backend_url
from gateway.observability.logs import log_event
from gateway.values import BackendId

Found = Mapping[BackendId, BackendSettings]


class Discovery:
    """Owns one background task. `join` adds a backend with its key to the fleet."""

    def __init__(
        self,
        sources: Sequence[Source],
        fleet: Fleet,
        join: Callable[[BackendSettings], None],
        *,
        interval_s: float,
        timeout_s: float,
    ) -> None:
        self._sources, self._fleet, self._join = tuple(sources), fleet, join
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._known: dict[Source, Found] = {source: {} for source in self._sources}
        self._added: dict[Source, set[BackendId]] = {source: set() for source in self._sources}
        self._failing: set[Source] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._sources:
            self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._interval_s)

    @property
    def named(self) -> set[BackendId]:
        """The backends in the sources' latest answers."""
        return {backend_id for found in self._known.values() for backend_id in found}

    async def look(self) -> None:
        """Ask every source once and apply what changed. A bug in one source does not affect the others."""
        for source in self._sources:
            try:
                await self._ask(source)
            except Exception:
                logging.getLogger(__name__).exception("discovery by %s", source.name)

    async def _ask(self, source: Source) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = {BackendId(backend.backend_id): backend for backend in await source.find()}
        except TimeoutError:
            self._fail(source, f"no answer within {self._timeout_s:g} s")
        except SourceUnavailable as error:
            self._fail(source, str(error))
        else:
            self._failing.discard(source)
            self._apply(self._known[source], found, self._added[source])
            self._known[source] = found

    def _apply(self, before: Found, now: Found, added: set[BackendId]) -> None:
        """Apply the differences; `added` are the backends that this source has added. Additions come
        first, so that the fleet is never smaller than either answer."""
        for backend_id, settings in now.items():
            if settings == before.get(backend_id):
                continue
            if backend_id not in before and self._is_new(backend_id, settings):
                added.add(backend_id)
                self._join(settings)
            elif backend_id in added and backend_id in self._fleet.view.backends:
                self._join(settings)  # it has changed
        for backend_id in before.keys() - now.keys():
            if backend_id in added and backend_id in self._fleet.view.backends:
                self._fleet.remove(backend_id)
            added.discard(backend_id)

    def _is_new(self, backend_id: BackendId, settings: BackendSettings) -> bool:
        """Whether the fleet has neither its id nor its address."""
        backends = self._fleet.view.backends
        url = normalise_backend_url(settings.url)
        return backend_id not in backends and all(backend.base_url != url for backend in backends.values())

    def _fail(self, source: Source, reason: str) -> None:
        """Log when a source starts to fail, not in every round."""
        if source not in self._failing:
            self._failing.add(source)
            log_event("discovery_failed", level=logging.WARNING, source=source.name, reason=reason)
