"""States, read from their owners when a page is asked for: fleet, routing, session store, event loop."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gateway.limits.allowance import REFUSAL_CAUSES
from gateway.limits.gate import REJECTION_CAUSES, QueueRoom
from gateway.limits.tenant_limiter import TenantLimiter
from gateway.observability.series import Counter, Gauge, Series
from gateway.sessions.store import StoreStats
from gateway.values import BackendId, BackendState, FleetView

if TYPE_CHECKING:
    from gateway.process.gateway import Gateway

_VERSION = importlib.metadata.version("homing")  # reads files: not while streams wait
_SHOWN_STATES = tuple(one for one in BackendState if one is not BackendState.REMOVED)


def state_gauges(gateway: Gateway) -> Iterator[Series[Any]]:
    """All states of one gateway. O(backends); asks no network."""
    yield from fleet_metrics(gateway.fleet.view, gateway.router.in_flight)
    yield from _store_metrics(gateway.sessions.stats())
    yield from _queue_metrics(gateway.admission.room, gateway.limiter)
    in_flight = Gauge("homing_requests_in_flight", "Requests under way", is_summed=True)
    in_flight[()] = gateway.proxy.num_in_flight
    yield in_flight
    lag = Gauge("homing_event_loop_lag_seconds", "Worst lateness of the event loop in the last half minute")
    lag[()] = gateway.loop_lag.worst_s()
    yield lag
    yield from _reload_metrics(gateway)
    lost = Counter("homing_log_lines_lost", "Log lines that nobody read in time")
    lost[()] = 0.0 if gateway.lines is None else float(gateway.lines.num_lost)
    yield lost
    distrusted = Counter("homing_distrusted_keys", "Requests whose session key was not believed", "kind")
    distrusted["shared"] = gateway.key_watch.num_shared
    distrusted["never_repeats"] = gateway.key_watch.num_unstable
    yield distrusted
    info = Gauge("homing_build_info", "Always 1, with the version as a label", "version", "python")
    info[_VERSION, platform.python_version()] = 1
    yield info


def _reload_metrics(gateway: Gateway) -> Iterator[Series[Any]]:
    generation = Gauge("homing_config_generation", "Configurations in force so far, with that of the start")
    generation[()] = gateway.reloader.generation
    successful = Gauge("homing_config_last_reload_successful", "0 after a reload that was refused")
    successful[()] = float(gateway.reloader.is_last_successful)
    yield from (generation, successful)


def fleet_metrics(view: FleetView, in_flight_on: Callable[[BackendId], int]) -> Iterator[Series[Any]]:
    """Eight series per backend, for 1,000 backends 0.6 MB of the page."""
    state = Gauge("homing_backend_state", "1 for the state that each backend is in", "backend", "state")
    epoch = Gauge(
        "homing_backend_epoch", "Life of each backend's cache; grows when a new one begins", "backend"
    )
    in_flight = Gauge(
        "homing_backend_in_flight", "Requests under way on each backend", "backend", is_summed=True
    )
    generation = Gauge("homing_fleet_generation", "Number of the current view of the fleet")
    for backend_id, backend in view.backends.items():
        for one in _SHOWN_STATES:
            state[backend_id, one.value] = float(one is backend.state)
        epoch[backend_id] = backend.epoch
        in_flight[backend_id] = in_flight_on(backend_id)
    generation[()] = view.generation
    yield from (state, epoch, in_flight, generation)


def _queue_metrics(room: QueueRoom, limiter: TenantLimiter) -> Iterator[Series[Any]]:
    depth = Gauge("homing_queue_depth", "Requests that wait for a place", is_summed=True)
    depth[()] = room.num_waiting
    rejections = Counter(
        "homing_admission_rejections",
        "Requests refused for lack of room or for their tenant's limits",
        "cause",
    )
    for cause in REJECTION_CAUSES:
        rejections[cause] = room.rejections[cause]
    for cause in REFUSAL_CAUSES:
        rejections[cause] = limiter.rejections[cause]
    yield from (depth, rejections)


def _store_metrics(stats: StoreStats) -> Iterator[Series[Any]]:
    sessions = Gauge("homing_sessions", "Sessions bound, as one process knows them", "store")
    sessions[stats.kind] = stats.num_sessions
    degraded = Gauge("homing_session_store_degraded", "1 while the session store is not whole")
    degraded[()] = float(stats.is_degraded)
    breaker = Gauge("homing_session_store_breaker", "1 for the state that the breaker is in", "state")
    for one in type(stats.breaker):
        breaker[one.value] = float(one is stats.breaker)
    lookups = Counter("homing_session_store_lookups", "Lookups by where they were answered", "source")
    lookups["local"], lookups["remote"] = stats.num_local_hits, stats.num_local_misses
    evictions = Counter("homing_session_store_evictions", "Sessions forgotten for lack of room")
    evictions[()] = stats.num_evictions
    errors = Counter("homing_session_store_errors", "Failed calls by kind", "kind")
    errors.update(stats.errors)
    calls = Counter("homing_session_store_calls", "Round trips that a request waited for")
    calls[()] = stats.num_calls
    seconds = Counter("homing_session_store_call_seconds", "Time that requests waited for the store")
    seconds[()] = stats.call_seconds_total
    yield from (sessions, degraded, breaker, lookups, evictions, errors, calls, seconds)
