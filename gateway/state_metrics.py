"""Gauges that are read from their owners when Prometheus asks: fleet, routing, session store, event loop."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from gateway.limits.gate import REJECTION_CAUSES, QueueRoom
from gateway.metrics import gauge, state_counter
from gateway.sessions.store import StoreStats
from gateway.values import BackendState

if TYPE_CHECKING:
    from gateway.app import Gateway


def state_metrics(gateway: Gateway) -> Iterator[Metric]:
    """All gauges of one gateway. O(backends); asks no network."""
    yield from _fleet_metrics(gateway)
    yield from _store_metrics(gateway.sessions.stats())
    yield from _queue_metrics(gateway.admission.room)
    in_flight = gauge("homing_requests_in_flight", "Requests under way in this process")
    in_flight.add_metric([], gateway.proxy.num_in_flight)
    yield in_flight
    lag = gauge("homing_event_loop_lag_seconds", "Worst lateness of the event loop since the last scrape")
    lag.add_metric([], gateway.loop_lag.take_worst_s())
    yield lag
    distrusted = state_counter(
        "homing_distrusted_keys", "Requests whose session key was not believed", "kind"
    )
    distrusted.add_metric(["shared"], gateway.proxy.key_watch.num_shared)
    distrusted.add_metric(["never_repeats"], gateway.proxy.key_watch.num_unstable)
    yield distrusted
    info = gauge("homing_build_info", "Version of this gateway", "version")
    info.add_metric([importlib.metadata.version("homing")], 1)
    yield info


def _fleet_metrics(gateway: Gateway) -> Iterator[Metric]:
    state = gauge("homing_backend_state", "1 for the state that each backend is in", "backend", "state")
    epoch = gauge("homing_backend_epoch", "Life of each backend's cache", "backend")
    in_flight = gauge("homing_backend_in_flight", "Requests under way on each backend", "backend")
    generation = gauge("homing_fleet_generation", "Number of the current view of the fleet")
    for backend_id, backend in gateway.fleet.view.backends.items():
        for one in BackendState:
            if one is not BackendState.REMOVED:
                state.add_metric([backend_id, one.value], float(one is backend.state))
        epoch.add_metric([backend_id], backend.epoch)
        in_flight.add_metric([backend_id], gateway.router.in_flight(backend_id))
    generation.add_metric([], gateway.fleet.view.generation)
    yield from (state, epoch, in_flight, generation)


def _queue_metrics(room: QueueRoom) -> Iterator[Metric]:
    depth = gauge("homing_queue_depth", "Requests that wait for a place")
    depth.add_metric([], room.num_waiting)
    waits = state_counter("homing_queue_waits", "Requests that got a place after a wait")
    waits.add_metric([], room.num_waited)
    rejections = state_counter(
        "homing_admission_rejections", "Requests refused for lack of room, by cause", "cause"
    )
    for cause in REJECTION_CAUSES:
        rejections.add_metric([cause], room.rejections[cause])
    yield from (depth, waits, rejections)


def _store_metrics(stats: StoreStats) -> Iterator[Metric]:
    sessions = gauge("homing_sessions", "Sessions bound, as this process knows them", "store")
    sessions.add_metric([stats.kind], stats.num_sessions)
    degraded = gauge("homing_session_store_degraded", "1 while the session store is not whole")
    degraded.add_metric([], float(stats.is_degraded))
    breaker = gauge("homing_session_store_breaker", "1 for the state that the breaker is in", "state")
    breaker.add_metric([stats.breaker.value], 1)
    lookups = state_counter("homing_session_store_lookups", "Lookups by where they were answered", "source")
    lookups.add_metric(["local"], stats.num_local_hits)
    lookups.add_metric(["remote"], stats.num_local_misses)
    evictions = state_counter("homing_session_store_evictions", "Sessions forgotten for lack of room")
    evictions.add_metric([], stats.num_evictions)
    errors = state_counter("homing_session_store_errors", "Failed calls by kind", "kind")
    for kind, count in stats.errors.items():
        errors.add_metric([kind], count)
    calls = state_counter("homing_session_store_calls", "Round trips that a request waited for")
    calls.add_metric([], stats.num_calls)
    seconds = state_counter("homing_session_store_call_seconds", "Time that requests waited for the store")
    seconds.add_metric([], stats.call_seconds_total)
    yield from (sessions, degraded, breaker, lookups, evictions, errors, calls, seconds)
