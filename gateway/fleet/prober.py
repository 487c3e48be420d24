"""Health probes: one task per backend that probes it, scrapes its metrics and lists its models.

A round is: health path → if it answers, metrics (start time, load, cache size) → whether it sleeps → every
few rounds the models. The metrics are read *before* the probe is counted, so that a restarted backend has its
new epoch by the time it becomes ready and no session is sent to a cold cache unknowingly. Suspect backends
are probed more often. A status below 500 counts as alive: a 401 on a probe is a matter of keys, not health.
With a failed probe goes what speaks against it: whether bytes of answers have come from the backend lately.

Models come and go between rounds. So a name that nobody serves, or that a backend no longer knows, has all of
them listed at once, but not often: names come from clients.

Redirects are never followed, answers are bounded, and every wait has a timeout.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable

import msgspec

from gateway.errors import UpstreamError
from gateway.fleet.engine_metrics import DIALECTS, parse_metrics
from gateway.fleet.model_list import read_models
from gateway.fleet.pools import UpstreamPools
from gateway.fleet.registry import Fleet
from gateway.fleet.settings import FleetSettings
from gateway.observability.logs import log_event
from gateway.routing.health import HealthSettings, Outcome
from gateway.routing.router import Router
from gateway.values import Backend, BackendId, BackendState, FleetView

ROUNDS_PER_MODEL_LIST = 15
NUM_TIMEOUT_PARTS = 4
LIST_ANEW_EVERY_S = 5.0
LIST_ANEW_TIMEOUT_S = 2.0
_MAX_LISTINGS = 64  # at a time
_HEALTH_LIMIT_BYTES = 4 * 1024 * 1024


class _Sleep(msgspec.Struct):
    is_sleeping: bool


_decode_sleep = msgspec.json.Decoder(_Sleep).decode


class Prober:
    """Owns the probe tasks: exactly one for each backend of the current view."""

    def __init__(
        self,
        fleet: Fleet,
        pools: UpstreamPools,
        router: Router,
        health: HealthSettings,
        settings: FleetSettings,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._fleet, self._pools, self._router = fleet, pools, router
        self._health, self._settings, self._clock = health, settings, clock
        self._tasks: dict[BackendId, asyncio.Task[None]] = {}
        self._num_unanswered: dict[BackendId, int] = {}  # failed probes of backends that have never answered
        self._tells_sleep: set[BackendId] = set()  # those that answer on the path for it
        self._listing: asyncio.Task[None] | None = None
        self._listed_s = -math.inf  # when a listing out of turn began

    def reconfigure(self, health: HealthSettings, settings: FleetSettings) -> None:
        """Probe at these intervals from the next round on."""
        self._health, self._settings = health, settings

    def sync(self, view: FleetView) -> None:
        """Start and stop tasks so that they match the view."""
        for backend_id in self._tasks.keys() - view.backends.keys():
            self._tasks.pop(backend_id).cancel()
            self._num_unanswered.pop(backend_id, None)
            self._tells_sleep.discard(backend_id)
        for backend_id in view.backends.keys() - self._tasks.keys():
            self._tasks[backend_id] = asyncio.ensure_future(self._watch(backend_id))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        if self._listing is not None:
            tasks.append(self._listing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def may_list_anew(self) -> bool:
        """Whether the models may be listed out of turn, or are being listed."""
        is_listing = self._listing is not None and not self._listing.done()
        return is_listing or self._clock() - self._listed_s >= LIST_ANEW_EVERY_S

    def list_soon(self) -> None:
        """List the models of all backends out of turn, if that was not done a moment ago."""
        if self.may_list_anew and (self._listing is None or self._listing.done()):
            self._listed_s = self._clock()
            self._listing = asyncio.ensure_future(self._list_all())

    async def list_anew(self) -> None:
        """The same, and wait for it, for a limited time."""
        self.list_soon()
        if self._listing is not None:
            await asyncio.wait((self._listing,), timeout=LIST_ANEW_TIMEOUT_S)

    async def _list_all(self) -> None:
        room = asyncio.Semaphore(_MAX_LISTINGS)

        async def list_one(backend: Backend) -> None:
            async with room:
                await self._list_models(backend)

        backends = [one for one in self._fleet.view.backends.values() if one.state.is_routable]
        await asyncio.gather(*map(list_one, backends), return_exceptions=True)

    async def _watch(self, backend_id: BackendId) -> None:
        """Probe forever; a failed round does not end the task."""
        round_number = 0
        while True:
            backend = self._fleet.view.get(backend_id)
            if backend is None:
                return
            try:
                await self._round(backend, round_number)
            except Exception:
                log_event("probe_failed_unexpectedly", level=logging.ERROR, backend=backend_id)
                logging.getLogger(__name__).exception("probe round")
            round_number += 1
            await self._pause(backend_id)

    async def _pause(self, backend_id: BackendId) -> None:
        is_suspect = self._fleet.health.is_suspect(backend_id)
        interval_s = self._health.suspect_interval_s if is_suspect else self._health.probe_interval_s
        # jitter, so that probes of many backends by many gateways do not synchronise
        await asyncio.sleep(interval_s * random.uniform(0.9, 1.1))

    async def _round(self, backend: Backend, round_number: int) -> None:
        dialect = DIALECTS[backend.engine]
        try:
            status, body = await self._get(backend, dialect.health_path)
        except (UpstreamError, TimeoutError) as error:
            reason = error.code if isinstance(error, UpstreamError) else "probe_timeout"
            self._fail(backend, reason, str(error) or "no answer in time")
            return
        if status >= 500:
            self._fail(backend, f"probe_{status}", f"{dialect.health_path} answered {status}")
            return
        if dialect.metrics_path:
            await self._scrape(backend, dialect.metrics_path)
        is_joining = backend.state in (BackendState.JOINING, BackendState.DOWN)
        asks_for_sleep = is_joining or round_number % ROUNDS_PER_MODEL_LIST == 0
        await self._see_sleep(backend, dialect.sleep_path, asks_anew=asks_for_sleep)
        if dialect.health_path == "/v1/models":
            self._take_models(backend, body)
        elif is_joining or round_number % ROUNDS_PER_MODEL_LIST == 0:
            await self._list_models(backend)
        self._fleet.observe_probe(backend.backend_id, Outcome.SUCCESS, "probe")

    def _fail(self, backend: Backend, reason: str, detail: str) -> None:
        """Count a failure, but for answers that flow all the while.

        A backend that has never answered changes no state, so it is logged here, once.
        """
        try:
            is_answering = self._pools.get(backend.backend_id).silent_for_s() <= self._health.life_s
        except UpstreamError:  # it has just been removed
            return
        self._fleet.observe_probe(backend.backend_id, Outcome.FAILURE, reason, is_answering=is_answering)
        if backend.state is not BackendState.JOINING:
            return
        num_unanswered = self._num_unanswered[backend.backend_id] = (
            self._num_unanswered.get(backend.backend_id, 0) + 1
        )
        if num_unanswered == self._health.unhealthy_after:
            log_event(
                "backend_unreachable",
                level=logging.WARNING,
                backend=backend.backend_id,
                url=backend.base_url,
                reason=detail[:200],
                advice="it is probed until it answers; check that the engine runs and that the url is right",
            )

    async def _scrape(self, backend: Backend, path: str) -> None:
        """Read the engine's metrics. They are optional: errors are ignored."""
        try:
            status, body = await self._get(backend, path)
        except (UpstreamError, TimeoutError):
            return
        if status != 200:
            return
        report = parse_metrics(body.decode("utf-8", "replace"), DIALECTS[backend.engine], backend.rank)
        self._fleet.observe_report(backend.backend_id, report)
        if report.num_running is not None:
            self._router.observe_load(
                backend.backend_id,
                num_running=int(report.num_running),
                num_waiting=int(report.num_waiting or 0),
                kv_usage=report.kv_usage or 0.0,
                now_s=self._clock(),
            )

    async def _see_sleep(self, backend: Backend, path: str, *, asks_anew: bool) -> None:
        """Find out whether an engine that is alive sleeps: by its metrics, or by a path that few serve."""
        backend_id = backend.backend_id
        is_asleep = self._fleet.report(backend_id).is_asleep
        if is_asleep is None and path and (asks_anew or backend_id in self._tells_sleep):
            is_asleep = await self._ask_for_sleep(backend, path)
            (self._tells_sleep.discard if is_asleep is None else self._tells_sleep.add)(backend_id)
        if is_asleep is not None:
            self._fleet.observe_sleep(backend_id, is_asleep=is_asleep)

    async def _ask_for_sleep(self, backend: Backend, path: str) -> bool | None:
        try:
            status, body = await self._get(backend, path)
            return _decode_sleep(body).is_sleeping if status == 200 else None
        except (UpstreamError, TimeoutError, msgspec.DecodeError):
            return None

    async def _list_models(self, backend: Backend) -> None:
        try:
            status, body = await self._get(backend, "/v1/models")
        except (UpstreamError, TimeoutError):
            return
        if status == 200:
            self._take_models(backend, body)

    def _take_models(self, backend: Backend, body: bytes) -> None:
        cards = read_models(body)
        if cards is not None:
            self._fleet.observe_models(backend.backend_id, cards)

    async def _get(self, backend: Backend, path: str) -> tuple[int, bytes]:
        """Send one GET, bounded in size and time. Raises UpstreamError or TimeoutError.

        The timeout is waited in parts, so that a long block of our own event loop uses up only one part and
        does not look as if every backend had timed out.
        """
        asking = asyncio.ensure_future(self._ask(backend, path))
        try:
            for _ in range(NUM_TIMEOUT_PARTS):
                await asyncio.wait((asking,), timeout=self._health.probe_timeout_s / NUM_TIMEOUT_PARTS)
                if asking.done():
                    return asking.result()
            raise TimeoutError
        finally:
            asking.cancel()
            await asyncio.wait((asking,))  # or a head without a body would pass for an answer that flows

    async def _ask(self, backend: Backend, path: str) -> tuple[int, bytes]:
        pool = self._pools.get(backend.backend_id)
        head = self._pools.own_request_head(backend.backend_id, "GET", path)
        exchange = await pool.open(head, b"", method="GET", replayable=True)
        try:
            limit_bytes = min(_HEALTH_LIMIT_BYTES, self._settings.scrape_limit_bytes)
            return exchange.status, await exchange.read(limit_bytes)
        finally:
            exchange.abort()
