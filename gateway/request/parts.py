"""What a proxy is made of, under one configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from gateway.fleet.pools import UpstreamPools
from gateway.fleet.prober import Prober
from gateway.fleet.registry import Fleet
from gateway.limits.admission import Admission
from gateway.observability.metrics import GatewayMetrics
from gateway.request.handover import Handover
from gateway.request.in_flight import RequestsInFlight
from gateway.request.intake import Intake
from gateway.request.ledger import Ledger
from gateway.request.recorder import Recorder
from gateway.request.settings import RequestConfig
from gateway.request.tracing import Tracing
from gateway.routing.failover import RetryBudget
from gateway.routing.router import Router
from gateway.sessions.store import SessionStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyParts:
    """Built by `process.parts`; shared by the proxy and its helpers."""

    config: RequestConfig
    intake: Intake
    sessions: SessionStore
    objects: SessionStore  # who made which object that engines keep
    router: Router
    fleet: Fleet
    pools: UpstreamPools
    prober: Prober
    metrics: GatewayMetrics
    recorder: Recorder
    handover: Handover
    admission: Admission
    in_flight: RequestsInFlight
    ledger: Ledger
    retries: RetryBudget
    tracing: Tracing | None = None
    clock: Callable[[], float] = time.monotonic
