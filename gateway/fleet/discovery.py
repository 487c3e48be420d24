"""Discovery: keeps the fleet in step with sources that know which engines there are.

Each source is asked every few seconds. What newly appears in its answer is added, what is no longer in it is
removed: running answers finish, sessions move at their next turn. The rules that matter are about bad days:

* A source that fails changes nothing, and one that suddenly knows nobody has failed: an outage of DNS or of
  the Kubernetes API must not empty the fleet. Backends that are really gone are found by probes, and stay in
  the list as down until the source names others.
* Only changes of a source's own answer count. So a backend that an operator removed stays removed until the
  source forgets it and names it again, and what the configuration or an operator added is never touched.
* One backend, one entry: what is in the fleet already, by id or by address, is not added twice, and a source
  changes and removes only what it has added.

Knows nothing of health. Every replica asks for itself; they agree because the sources do.
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
    """Owns one background task. `join` adds a backend to the fleet, with its key."""

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

    async def look(self) -> None:
        """Ask every source once and apply what changed. Supervisor: a bug in one source ends no other."""
        for source in self._sources:
            try:
                await self._ask(source)
            except Exception:
                logging.getLogger(__name__).exception("discovery by %s", source.name)

    async def _ask(self, source: Source) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = {BackendId(one.backend_id): one for one in await source.find()}
        except TimeoutError:
            self._fail(source, f"no answer within {self._timeout_s:g} s")
        except SourceUnavailable as error:
            self._fail(source, str(error))
        else:
            self._failing.discard(source)
            self._apply(self._known[source], found, self._added[source])
            self._known[source] = found

    def _apply(self, before: Found, now: Found, added: set[BackendId]) -> None:
        """Newcomers first, so that the fleet is never smaller than either answer. `added`: by this source."""
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
        """Whether nobody else brought it, by id or by address."""
        backends = self._fleet.view.backends
        url = normalise_backend_url(settings.url)
        return backend_id not in backends and all(one.base_url != url for one in backends.values())

    def _fail(self, source: Source, reason: str) -> None:
        """One line when trouble begins, not one per round."""
        if source not in self._failing:
            self._failing.add(source)
            log_event("discovery_failed", level=logging.WARNING, source=source.name, reason=reason)
