"""Applies the configured backends to the fleet: all of them at start, the differences at a reload.

Decision: a reload applies only what differs between two configurations. So a backend that the admin API added
stays, a weight that an operator set holds until the file itself changes it, and a backend that was removed by
hand does not come back because an unrelated line was edited.

A backend that is no longer configured drains: no new sessions, bound ones move at their next turn (prewarmed
first, if that is on), and it leaves the fleet when nothing runs on it or at the drain deadline.

Knows nothing of how the configuration was read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from gateway.config.config import ConfigError
from gateway.fleet.registry import Fleet
from gateway.fleet.settings import BackendSettings, backend_of, normalise_backend_url
from gateway.observability.logs import log_event
from gateway.request.handover import Handover
from gateway.routing.router import Router
from gateway.values import BackendId

DEPARTURE_POLL_S = 0.25
"""How often a leaving backend is checked for running requests."""


class Membership:
    """Owns one task per leaving backend."""

    def __init__(self, fleet: Fleet, router: Router, handover: Handover, environ: Mapping[str, str]) -> None:
        self._fleet, self._router, self._handover, self._environ = fleet, router, handover, environ
        self._departures: dict[BackendId, asyncio.Task[None]] = {}

    def check(self, before: Sequence[BackendSettings], after: Sequence[BackendSettings]) -> None:
        """Raises ConfigError if a backend has the address of one that the admin API added."""
        present = {backend.base_url: backend.backend_id for backend in self._fleet.view.backends.values()}
        named = {settings.backend_id for settings in (*before, *after)} | self._departures.keys()
        for settings in after:
            holder = present.get(normalise_backend_url(settings.url))
            if holder is not None and holder not in named:
                raise ConfigError(
                    f"backends.{settings.backend_id}.url: backend {holder} already has this url"
                )

    def apply(
        self,
        before: Sequence[BackendSettings],
        after: Sequence[BackendSettings],
        *,
        drain_deadline_s: float = 0.0,
    ) -> list[BackendSettings]:
        """Apply the differences, published as one new view. Returns the backends that are new or changed."""
        known = {settings.backend_id: settings for settings in before}
        named = {settings.backend_id for settings in after}
        changed = [settings for settings in after if known.get(settings.backend_id) != settings]
        with self._fleet.one_change("configured"):
            for name in known.keys() - named:
                self._remove(BackendId(name), drain_deadline_s)
            for settings in changed:
                self.join(settings)
        return changed

    async def close(self) -> None:
        tasks = tuple(self._departures.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def join(self, settings: BackendSettings) -> None:
        """Add or change a backend, with its key from the environment. If it was leaving, it stays."""
        backend = backend_of(settings)
        departure = self._departures.pop(backend.backend_id, None)
        if departure is not None:
            departure.cancel()
            self._fleet.undrain(backend.backend_id)
        variable = settings.api_key_env
        api_key = self._environ.get(variable) if variable else None
        if variable and not api_key:
            log_event(
                "backend_key_missing", level=logging.WARNING, backend=backend.backend_id, api_key_env=variable
            )
        self._fleet.add(backend, api_key=api_key)

    def _remove(self, backend_id: BackendId, deadline_s: float) -> None:
        if backend_id not in self._fleet.view.backends:
            return  # an operator has removed it already
        self._fleet.drain(backend_id, deadline_s)
        task = asyncio.ensure_future(self._remove_when_idle(backend_id, deadline_s))
        self._departures[backend_id] = task

    async def _remove_when_idle(self, backend_id: BackendId, deadline_s: float) -> None:
        """Remove it when idle or at the deadline; answers that still run then have a last grace period."""
        loop = asyncio.get_running_loop()
        deadline_at_s = loop.time() + deadline_s
        while True:
            is_busy = self._router.in_flight(backend_id) or self._handover.is_running(backend_id)
            if not is_busy or loop.time() >= deadline_at_s:
                break
            await asyncio.sleep(DEPARTURE_POLL_S)
        del self._departures[backend_id]
        if self._fleet.drain_left_s(backend_id) is not None:  # otherwise an operator removed or undrained it
            self._fleet.remove(backend_id)
            log_event("backend_left", backend=backend_id)
