"""The composition root: builds one gateway from its configuration, runs it, takes it down in order.

Nothing else in the package constructs these parts, and none of them is global, so a test builds as many
gateways as it likes in one process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from gateway.admin.api import AdminApi
from gateway.admin.parts import AdminParts
from gateway.admin.process_operations import describe_replica
from gateway.config.config import Config, ConfigError, key_secret
from gateway.config.reload import Reloader
from gateway.downstream.refusal import Refusal
from gateway.downstream.server import ClientServer
from gateway.fleet.discovery import Discovery
from gateway.fleet.discovery_sources import make_sources
from gateway.fleet.engine_metrics import EngineReport
from gateway.fleet.operator import Operator
from gateway.fleet.pools import UpstreamPools
from gateway.fleet.prober import Prober
from gateway.fleet.registry import Fleet, StateChange
from gateway.fleet.replica_sync import ReplicaSync
from gateway.limits.admission import Admission
from gateway.limits.tenant_limiter import TenantLimiter
from gateway.observability.log_writer import LogWriter
from gateway.observability.logs import AccessLog, log_event
from gateway.observability.loop_lag import LoopLag
from gateway.observability.metrics import GatewayMetrics, status_label
from gateway.observability.series import Series
from gateway.observability.worker_reports import WorkerReports
from gateway.process.authentication import Authentication
from gateway.process.gauges import state_gauges
from gateway.process.membership import Membership
from gateway.process.servers import Contexts, Servers, read_contexts
from gateway.process.shared_state import (
    open_loads,
    open_orders,
    open_presence,
    open_store,
    open_tenant_use,
)
from gateway.replay.recording_file import RecordingFile
from gateway.replay.rivals.registry import ALL_POLICIES
from gateway.replicas.presence import SharedPresence
from gateway.request.body_helper import BodyHelper, FactsReader, ParserPlan
from gateway.request.front import Front
from gateway.request.handover import Handover
from gateway.request.in_flight import RequestsInFlight
from gateway.request.intake import Intake
from gateway.request.journal import Journal
from gateway.request.ledger import Ledger
from gateway.request.operator_tokens import Tokens
from gateway.request.parts import ProxyParts
from gateway.request.proxy import Proxy
from gateway.request.recorder import Recorder
from gateway.request.tracing import Tracing, open_tracing
from gateway.routing.failover import RetryBudget
from gateway.routing.key_watch import KeyWatch
from gateway.routing.recording import RecordingRouter
from gateway.routing.ring import Ring
from gateway.routing.router import Router
from gateway.tenants.directory import Directory
from gateway.values import Api, BackendId, BackendState, FleetView

LEAVING_NOTICE_S = 0.2
"""How long the gateway answers `not ready` before it stops accepting, so that a balancer can notice."""
LAST_REQUESTS_S = 0.2
"""How long the requests of the last connections may take to arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The parts of a new configuration whose making can fail."""

    reader: FactsReader
    directory: Directory
    contexts: Contexts


class Gateway:
    """One gateway process: `start`, serve, `stop`."""

    def __init__(
        self,
        config: Config,
        *,
        load: Callable[[], Config] | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        record_path: Path | None = None,
        sockets: Mapping[str, socket.socket] | None = None,
        worker_reports: WorkerReports | None = None,
        lines: LogWriter | None = None,
    ) -> None:
        """`load` reads the configuration again, for a reload; `sockets` (data, admin) are inherited ones."""
        self.config = config
        self._environ, self._clock, self.lines = environ, clock, lines
        self._servers = Servers(sockets or {})
        self.reloader: Reloader[Prepared] = Reloader(config, load=load or (lambda: config), target=self)
        self._worker_reports, self.metrics = worker_reports, GatewayMetrics(worker_reports)
        self._recording = RecordingFile(record_path) if record_path is not None else None
        self.router = (
            Router(config.routing, policies=ALL_POLICIES)
            if self._recording is None
            else RecordingRouter(config.routing, self._recording.write, policies=ALL_POLICIES)
        )
        self.fleet = Fleet(config.health, on_view=self._on_view, on_change=self._on_change, clock=clock)
        self.sessions = open_store(config.sessions, clock=clock, environ=environ)
        self.operator = Operator(self.fleet, open_orders(self.sessions), clock=clock)
        presence = open_presence(self.sessions)
        self.replica_sync = ReplicaSync(
            self.router,
            open_loads(self.sessions, clock=clock),
            self.operator,
            clock=clock,
            tell=lambda: presence.publish(describe_replica(self._admin_parts).encoded()),
        )
        self.pools = UpstreamPools(self.fleet, config.upstream)
        self.prober = Prober(self.fleet, self.pools, config.health, config.fleet, on_report=self._on_report)
        self.body_helper = BodyHelper()
        self.reader = self._make_reader(config)
        journal_sessions = config.admin.journal_sessions if config.admin.is_enabled else 0
        self.journal = Journal(journal_sessions) if journal_sessions else None
        log = AccessLog(None if lines is None else lines.put)
        self.recorder = Recorder(self.metrics, self.sessions, self.reader.parser, log, self.journal)
        self.recorder.logs_requests = config.log.access
        self.handover = Handover(
            config.fleet, self.fleet, self.router, self.sessions, self.pools, clock=clock
        )
        self.admission = Admission(config.limits, clock=clock)
        self.tenant_use = open_tenant_use(self.sessions, clock=clock)
        self.limiter = TenantLimiter(
            max_tenants=config.limits.max_tenants_tracked,
            clock=clock,
            shared=self.tenant_use,
        )
        self.membership = Membership(self.fleet, self.router, self.handover, environ)
        self.discovery = self._make_discovery(config)
        self.key_watch = KeyWatch(config.key_watch)
        self.authentication = Authentication(config, self.sessions, clock=clock, environ=environ)
        self.in_flight = RequestsInFlight()
        self.ledger = Ledger(self.router, self.recorder, clock=clock)
        self._tracing = _open_tracing(config)
        self._proxy_parts = self._make_proxy_parts(config)
        self.proxy = Proxy(self._proxy_parts)
        self._admin_parts = self._make_admin_parts(presence)
        self.front = Front(self.proxy, self.fleet, self.metrics, config, clock=clock)
        self.front.degraded = self._degraded
        self._admin_tokens = Tokens(
            operate=environ.get(config.admin.token_env), read=environ.get(config.admin.read_token_env)
        )
        self.front.debug_tokens = self._admin_tokens if self._admin_tokens.is_any else None
        self.loop_lag = LoopLag()
        self.metrics.add_state(self._state)
        self.port = self.admin_port = 0

    # -- construction, continued

    def _make_discovery(self, config: Config) -> Discovery:
        discovery = config.fleet.discovery
        return Discovery(
            make_sources(discovery, self._environ),
            self.fleet,
            self.membership.join,
            interval_s=discovery.interval_s,
            timeout_s=discovery.timeout_s,
        )

    def _make_proxy_parts(self, config: Config) -> ProxyParts:
        return ProxyParts(
            config=config,
            intake=self._make_intake(config),
            sessions=self.sessions,
            router=self.router,
            fleet=self.fleet,
            pools=self.pools,
            metrics=self.metrics,
            recorder=self.recorder,
            handover=self.handover,
            admission=self.admission,
            in_flight=self.in_flight,
            ledger=self.ledger,
            tracing=self._tracing,
            retries=RetryBudget(config.failover),
            clock=self._clock,
        )

    def _make_admin_parts(self, presence: SharedPresence) -> AdminParts:
        return AdminParts(
            config=lambda: self.config,
            fleet=self.fleet,
            operator=self.operator,
            router=self.router,
            sessions=self.sessions,
            parser=lambda: self.reader.parser,
            metrics=self.metrics,
            handover=self.handover,
            pools=self.pools,
            presence=presence,
            journal=self.journal,
            tenant_named=lambda name: self.authentication.gatekeeper.directory.named(name),
            num_in_flight=lambda: len(self.in_flight),
            settle=self.ledger.drain,
            reload=self.reloader.reload,
            environ=self._environ,
            clock=self._clock,
        )

    # -- life

    async def start(self) -> None:
        """Start everything and listen. Raises OSError when a port cannot be had; nothing is left running."""
        try:
            await self.sessions.start()
            self.membership.apply((), self.config.backends)
            self.discovery.start()
            self.loop_lag.start()
            self.authentication.start()
            if self.tenant_use is not None:
                self.tenant_use.start(self.limiter.num_in_flight)
            if self._worker_reports is not None:
                self._worker_reports.start(self.metrics.own_families)
            if self.config.sessions.store == "redis":
                self.replica_sync.start()
            contexts = read_contexts(self.config)
            server = ClientServer(self.front.handle, self.config.downstream, on_refusal=self._on_refusal)
            self.port = await self._servers.open_data(server, self.config, contexts)
            if self.config.admin.is_enabled:
                application = self._admin_application()
                self.admin_port = await self._servers.open_admin(application, self.config, contexts)
        except BaseException:
            await self.stop(drain_timeout_s=0)
            raise
        log_event("gateway_started", port=self.port, admin_port=self.admin_port)

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Leave in order: not ready, no new connections, finish what runs, then close. Idempotent."""
        timeout_s = self.config.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        self.front.is_leaving = True
        self._servers.leave()
        if self._servers.is_open:
            await asyncio.sleep(min(LEAVING_NOTICE_S, timeout_s))
            await self._servers.stop_accepting_clients()
            await asyncio.sleep(min(LAST_REQUESTS_S, timeout_s))
            await self._finish_running(timeout_s)
        await self._servers.close()
        await self.discovery.close()
        await self.membership.close()
        await self.replica_sync.close()
        await self.handover.close()
        await self.prober.close()
        self.ledger.drain()
        await self.recorder.close()
        await self.body_helper.close()
        await self.pools.close()
        await self.authentication.close()
        if self.tenant_use is not None:
            await self.tenant_use.close()
        await self.sessions.close()
        self.loop_lag.stop()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if self._worker_reports is not None:
            self._worker_reports.stop()
        if self._recording is not None:
            self._recording.close()

    async def _finish_running(self, timeout_s: float) -> None:
        """Wait for running answers; at the deadline tell the streams in band why they end."""
        if timeout_s > 0:
            await self.in_flight.wait_idle(timeout_s)
        if len(self.in_flight):
            log_event("drain_deadline", in_flight=len(self.in_flight))
            await self.in_flight.end_all()

    # -- reload

    def prepare(self, config: Config) -> Prepared:
        """Make what can fail. Raises ConfigError. Changes nothing."""
        self.membership.check(self.config.backends, config.backends)
        weights = {BackendId(one.backend_id): one.weight for one in config.backends}
        Ring(weights, config.routing.virtual_nodes)  # the ring of the swap then finds the points made
        return Prepared(
            reader=self._make_reader(config),
            directory=self.authentication.make_directory(config),
            contexts=read_contexts(config),
        )

    async def swap(self, config: Config, prepared: Prepared) -> None:
        """Take over. Certificates are awaited before anything else has changed, other replicas after it."""
        await self._servers.use(prepared.contexts)
        self.authentication.take_over(prepared.directory)  # keys may have changed where options have not
        if config == self.config:
            return
        before, self.config = self.config, config
        if config.log.level != before.log.level:
            logging.getLogger().setLevel(config.log.level.upper())
        self.recorder.logs_requests = config.log.access
        self.router.reconfigure(config.routing)
        self.fleet.reconfigure(config.health)
        self.prober.reconfigure(config.health, config.fleet)
        self.handover.reconfigure(config.fleet)
        self.reader = prepared.reader
        self._swap_proxy(before, config)
        changed = self.membership.apply(
            before.backends, config.backends, drain_deadline_s=config.fleet.drain_deadline_s
        )
        for one in changed:
            await self.operator.yield_to_configuration(BackendId(one.backend_id), one.weight)

    def _swap_proxy(self, before: Config, config: Config) -> None:
        """Requests under way stay with the old proxy; both count and remember in the same places."""
        parts = self._proxy_parts
        self.key_watch.reconfigure(config.key_watch)
        parts.admission.reconfigure(config.limits)
        retries = parts.retries if config.failover == before.failover else RetryBudget(config.failover)
        self._proxy_parts = replace(parts, config=config, intake=self._make_intake(config), retries=retries)
        self.proxy = Proxy(self._proxy_parts)
        self.front.take_over(self.proxy, config)

    def _make_intake(self, config: Config) -> Intake:
        return Intake(
            reader=self.reader,
            key_watch=self.key_watch,
            gatekeeper=self.authentication.gatekeeper,
            limiter=self.limiter,
            max_body_bytes=config.downstream.max_body_bytes,
            store_deadline=self.sessions.deadline,
        )

    def _make_reader(self, config: Config) -> FactsReader:
        plan = ParserPlan(
            settings=config.keys,
            secret=key_secret(self._environ),
            max_decoded_bytes=config.downstream.max_body_bytes,
        )
        return FactsReader(plan, self.body_helper, inline_bytes=config.downstream.max_inline_body_bytes)

    def _admin_application(self) -> web.Application:
        return AdminApi(self._admin_parts, tokens=self._admin_tokens).application()

    # -- what the fleet tells

    def _on_view(self, view: FleetView) -> None:
        self.metrics.keep_backends(view.backends.keys())
        self.router.observe_view(view, self._clock())
        self.pools.sync(view)
        self.prober.sync(view)
        self.admission.observe_view(view)

    def _on_change(self, change: StateChange) -> None:
        if change.after is BackendState.DRAINING:
            self.handover.start(change.backend_id)
        elif change.before is BackendState.DRAINING:
            self.handover.cancel(change.backend_id)
        log_event(
            "backend_state",
            backend=change.backend_id,
            before=change.before.value,
            after=change.after.value,
            reason=change.reason,
        )

    def _on_refusal(self, refusal: Refusal) -> None:
        """A request that got no further than the server: unparsable, or too large a head."""
        self.metrics.requests[Api.OTHER.value, status_label(refusal.status)] += 1.0
        self.metrics.errors[refusal.source, refusal.code] += 1.0

    def _on_report(self, backend_id: BackendId, report: EngineReport) -> None:
        if report.num_running is None:
            return
        self.router.observe_load(
            backend_id,
            num_running=int(report.num_running),
            num_waiting=int(report.num_waiting or 0),
            kv_usage=report.kv_usage or 0.0,
            now_s=self._clock(),
        )

    def _state(self) -> Iterator[Series[Any]]:
        self.ledger.drain()
        return state_gauges(self)

    def _degraded(self) -> list[str]:
        return ["session_store"] if self.sessions.stats().is_degraded else []


def _open_tracing(config: Config) -> Tracing | None:
    try:
        return open_tracing(config.tracing)
    except ValueError as error:
        raise ConfigError(str(error)) from error
