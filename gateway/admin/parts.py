"""The parts of one gateway that the admin API uses. `process/gateway.py` passes them in."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.admin.settings import AdminSettings
from gateway.downstream.settings import DownstreamSettings
from gateway.fleet.operator import Operator
from gateway.fleet.pools import UpstreamPools
from gateway.fleet.registry import Fleet
from gateway.fleet.settings import BackendSettings, FleetSettings
from gateway.observability.metrics import GatewayMetrics
from gateway.replicas.presence import SharedPresence
from gateway.request.handover import Handover
from gateway.request.journal import Journal
from gateway.routing.router import Router
from gateway.routing.settings import RoutingSettings
from gateway.sessions.store import SessionStore
from gateway.tenants.settings import AuthenticationSettings
from gateway.tenants.tenant import Tenant
from gateway.values import ReloadReport
from gateway.wire.facts import FactsParser


class AdminConfig(Protocol):
    """The part of the configuration that the admin API reads; `gateway.config.config.Config` satisfies it.

    A Protocol because `gateway.config` imports the settings of every package, this one's included.
    """

    @property
    def admin(self) -> AdminSettings: ...

    @property
    def authentication(self) -> AuthenticationSettings: ...

    @property
    def backends(self) -> Sequence[BackendSettings]: ...

    @property
    def downstream(self) -> DownstreamSettings: ...

    @property
    def fleet(self) -> FleetSettings: ...

    @property
    def passthrough_paths(self) -> tuple[str, ...]: ...

    @property
    def routing(self) -> RoutingSettings: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """What operators may see and change of one gateway."""

    config: Callable[[], AdminConfig]  # returns the current one: a reload replaces it
    fleet: Fleet
    operator: Operator
    router: Router
    sessions: SessionStore
    parser: Callable[[], FactsParser]
    metrics: GatewayMetrics
    handover: Handover
    pools: UpstreamPools
    presence: SharedPresence
    journal: Journal | None
    tenant_named: Callable[[str], Tenant | None]
    num_in_flight: Callable[[], int]
    settle: Callable[[], None]  # writes down the requests that have ended, before their numbers are shown
    reload: Callable[[], Awaitable[ReloadReport]]
    environ: Mapping[str, str]
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    started_wall_s: float = field(default_factory=time.time)

    def to_wall_s(self, monotonic_s: float) -> float:
        """Convert a time of the gateway's monotonic clock to Unix time."""
        return round(self.wall_clock() - self.clock() + monotonic_s, 3)
