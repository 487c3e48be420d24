"""State metrics, read from their owners when a page is requested: fleet, sessions, queues, event loop."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gateway.config.reload import Reloader
from gateway.fleet.registry import Fleet
from gateway.limits.admission import Admission
from gateway.limits.allowance import REFUSAL_CAUSES
from gateway.limits.gate import REJECTION_CAUSES, QueueRoom
from gateway.limits.tenant_limiter import TenantLimiter
from gateway.observability.log_writer import LogWriter
from gateway.observability.loop_lag import LoopLag
from gateway.observability.series import Counter, Gauge, Series
from gateway.request.in_flight import RequestsInFlight
from gateway.routing.key_watch import KeyWatch
from gateway.routing.router import Router
from gateway.sessions.store import SessionStore, StoreStats
from gateway.values import BackendId, BackendState, FleetView

_VERSION = importlib.metadata.version("homing")  # reads files, so not while requests run
_SHOWN_STATES = tuple(state for state in BackendState if state is not BackendState.REMOVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeSources:
    """The parts of one gateway whose state is shown."""

    settle: Callable[[], None]  # writes down the requests that have ended, before their numbers are shown
    fleet: Fleet
    router: Router
    sessions: SessionStore
    admission: Admission
    limiter: TenantLimiter
    in_flight: RequestsInFlight
    key_watch: KeyWatch
    loop_lag: LoopLag
    reloader: Reloader[Any]
    lines: LogWriter | None


def state_gauges(sources: GaugeSources) -> Iterator[Series[Any]]:
    """All state metrics of one gateway. O(backends); no network I/O."""
    sources.settle()
    yield from fleet_metrics(sources.fleet.view, sources.router.in_flight)
    spared = Gauge("homing_backends_spared", "Backends in service though their probes or requests fail")
    spared[()] = len(sources.fleet.spared)
    yield spared
    yield from _store_metrics(sources.sessions.stats())
    yield from _queue_metrics(sources.admission.room, sources.limiter)
    in_flight = Gauge("homing_requests_in_flight", "Requests in flight", is_summed=True)
    in_flight[()] = len(sources.in_flight)
    yield in_flight
    yield from _process_metrics(sources)
    distrusted = Counter("homing_distrusted_keys", "Requests whose session key was not trusted", "kind")
    distrusted["shared"] = sources.key_watch.num_shared
    distrusted["never_repeats"] = sources.key_watch.num_unstable
    yield distrusted


def _process_metrics(sources: GaugeSources) -> Iterator[Series[Any]]:
    lag = Gauge("homing_event_loop_lag_seconds", "Worst delay of the event loop in the last half minute")
    lag[()] = sources.loop_lag.worst_s()
    generation = Gauge("homing_config_generation", "Configurations in force so far, including the first")
    generation[()] = sources.reloader.generation
    successful = Gauge("homing_config_last_reload_successful", "0 after a reload that was rejected")
    successful[()] = float(sources.reloader.is_last_successful)
    lost = Counter("homing_log_lines_lost", "Log lines dropped because they were not read in time")
    lost[()] = 0.0 if sources.lines is None else float(sources.lines.num_lost)
    info = Gauge("homing_build_info", "Always 1, with the version as a label", "version", "python")
    info[_VERSION, platform.python_version()] = 1
    yield from (lag, generation, successful, lost, info)


def fleet_metrics(view: FleetView, in_flight_on: Callable[[BackendId], int]) -> Iterator[Series[Any]]:
    """Eight series per backend: 0.6 MB of the page for 1,000 backends."""
    state = Gauge("homing_backend_state", "1 for the current state of each backend", "backend", "state")
    epoch = Gauge(
        "homing_backend_epoch", "Epoch of each backend's cache; grows when the backend restarts", "backend"
    )
    in_flight = Gauge(
        "homing_backend_in_flight", "Requests in flight on each backend", "backend", is_summed=True
    )
    generation = Gauge("homing_fleet_generation", "Number of the current fleet view")
    for backend_id, backend in view.backends.items():
        for shown in _SHOWN_STATES:
            state[backend_id, shown.value] = float(shown is backend.state)
        epoch[backend_id] = backend.epoch
        in_flight[backend_id] = in_flight_on(backend_id)
    generation[()] = view.generation
    yield from (state, epoch, in_flight, generation)


def _queue_metrics(room: QueueRoom, limiter: TenantLimiter) -> Iterator[Series[Any]]:
    depth = Gauge("homing_queue_depth", "Requests waiting for a place", is_summed=True)
    depth[()] = room.num_waiting
    rejections = Counter(
        "homing_admission_rejections",
        "Requests refused because the gateway was full or a tenant reached a limit",
        "cause",
    )
    for cause in REJECTION_CAUSES:
        rejections[cause] = room.rejections[cause]
    for cause in REFUSAL_CAUSES:
        rejections[cause] = limiter.rejections[cause]
    yield from (depth, rejections)


def _store_metrics(stats: StoreStats) -> Iterator[Series[Any]]:
    sessions = Gauge("homing_sessions", "Bound sessions known to this process", "store")
    sessions[stats.kind] = stats.num_sessions
    degraded = Gauge("homing_session_store_degraded", "1 while the session store does not work fully")
    degraded[()] = float(stats.is_degraded)
    breaker = Gauge("homing_session_store_breaker", "1 for the current state of the breaker", "state")
    for shown in type(stats.breaker):
        breaker[shown.value] = float(shown is stats.breaker)
    lookups = Counter("homing_session_store_lookups", "Lookups by where they were answered", "source")
    lookups["local"], lookups["remote"] = stats.num_local_hits, stats.num_local_misses
    evictions = Counter("homing_session_store_evictions", "Sessions evicted because the store was full")
    evictions[()] = stats.num_evictions
    errors = Counter("homing_session_store_errors", "Failed calls by kind", "kind")
    errors.update(stats.errors)
    calls = Counter("homing_session_store_calls", "Round trips that requests waited for")
    calls[()] = stats.num_calls
    seconds = Counter("homing_session_store_call_seconds", "Time that requests waited for the store")
    seconds[()] = stats.call_seconds_total
    yield from (sessions, degraded, breaker, lookups, evictions, errors, calls, seconds)
