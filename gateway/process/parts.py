"""The composition root: builds and connects the parts of one gateway from its configuration.

Only this module constructs these parts, and none of them is global, so a test can build several gateways in
one process. What reacts to an event (a new view, a drain, a refused request) is the part concerned; here the
parts are only connected. A reload replaces those that depend on what has changed. Starting and stopping is
`gateway.py`'s.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.admin.parts import AdminParts
from gateway.admin.process_operations import describe_replica
from gateway.config.config import Config, ConfigError, key_secret
from gateway.config.reload import Reloader
from gateway.fleet.discovery import Discovery
from gateway.fleet.discovery_sources import make_sources
from gateway.fleet.operator import Operator
from gateway.fleet.pools import UpstreamPools
from gateway.fleet.prober import Prober
from gateway.fleet.registry import Fleet
from gateway.fleet.replica_sync import ReplicaSync
from gateway.fleet.settings import BackendSettings
from gateway.limits.admission import Admission
from gateway.limits.tenant_limiter import TenantLimiter
from gateway.observability.log_writer import LogWriter
from gateway.observability.logs import AccessLog
from gateway.observability.loop_lag import LoopLag
from gateway.observability.metrics import GatewayMetrics
from gateway.observability.worker_reports import WorkerReports
from gateway.process.authentication import Authentication
from gateway.process.gauges import GaugeSources, state_gauges
from gateway.process.membership import Membership
from gateway.process.servers import Contexts, Servers, read_contexts
from gateway.process.shared_state import open_shared_state
from gateway.replay.recording_file import RecordingFile
from gateway.replay.rivals.registry import ALL_POLICIES
from gateway.request.body_helper import BodyHelper, FactsReader, ParserPlan
from gateway.request.front import Front
from gateway.request.handover import Handover
from gateway.request.in_flight import RequestsInFlight
from gateway.request.intake import Intake
from gateway.request.journal import Journal
from gateway.request.ledger import Ledger
from gateway.request.made_objects import MadeObjects
from gateway.request.operator_tokens import Tokens
from gateway.request.parts import ProxyParts
from gateway.request.proxy import Proxy
from gateway.request.recorder import Recorder
from gateway.request.spending import Spending
from gateway.request.tracing import Tracing, open_tracing
from gateway.routing.failover import RetryBudget
from gateway.routing.key_watch import KeyWatch
from gateway.routing.recording import RecordingRouter
from gateway.routing.ring import Ring
from gateway.routing.router import Router
from gateway.sessions.store import SessionStore
from gateway.tenants.directory import Directory
from gateway.values import BackendId


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The parts of a new configuration that can fail to build."""

    reader: FactsReader
    directory: Directory
    contexts: Contexts


class GatewayParts:
    """All parts of one gateway, built and connected. `prepare` and `swap` are `config.reload.Target`."""

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
        """`load` reads the configuration again for a reload; `sockets` (data, admin) are inherited ones."""
        self.config = config
        self._environ, self._clock = environ, clock
        self.servers = Servers(sockets or {})
        self.reloader: Reloader[Prepared] = Reloader(config, load=load or (lambda: config), target=self)
        self.worker_reports, self.metrics = worker_reports, GatewayMetrics(worker_reports)
        self.shared = open_shared_state(config, clock=clock, environ=environ)
        self.sessions = self.shared.sessions
        self.recording = RecordingFile(record_path) if record_path is not None else None
        self.router = _make_router(config, self.recording)
        self._build_fleet(config)
        self._build_limits(config)
        self._build_recorder(config, lines)
        self._build_membership(config)
        self._build_proxy(config)
        self._build_admin(config)
        self._build_front(config)
        self.loop_lag = LoopLag()
        self.metrics.add_state(functools.partial(state_gauges, self._gauge_sources(lines)))
        self.port = self.admin_port = 0

    # -- construction: one builder per room, in the order of their dependencies

    def _build_fleet(self, config: Config) -> None:
        """The fleet, and the order in which its observers learn of a new view: the router before those that
        close connections or start probes."""
        self.fleet = Fleet(config.health, clock=self._clock)
        self.operator = Operator(self.fleet, self.shared.orders, config.fleet, named=self._named_backends)
        self.pools = UpstreamPools(self.fleet, config.upstream)
        self.prober = Prober(
            self.fleet, self.pools, self.router, config.health, config.fleet, clock=self._clock
        )
        self.replica_sync = ReplicaSync(
            self.router,
            self.shared.loads,
            self.shared.news,
            self.operator,
            clock=self._clock,
            publish_presence=lambda: self.shared.presence.publish(
                describe_replica(self.admin_parts).encoded()
            ),
        )
        self.fleet.add_view_observer(lambda view: self.metrics.keep_backends(view.backends.keys()))
        self.fleet.add_view_observer(lambda view: self.router.observe_view(view, self._clock()))
        self.fleet.add_view_observer(self.pools.sync)
        self.fleet.add_view_observer(self.prober.sync)

    def _build_limits(self, config: Config) -> None:
        self.admission = Admission(config.limits, clock=self._clock)
        self.fleet.add_view_observer(self.admission.observe_view)
        self.spending = Spending()
        self.limiter = TenantLimiter(
            max_tenants=config.limits.max_tenants_tracked, clock=self._clock, shared=self.shared.tenant_use
        )
        self.authentication = Authentication(
            config, self.shared.redis_keys, clock=self._clock, environ=self._environ
        )

    def _build_recorder(self, config: Config, lines: LogWriter | None) -> None:
        self.body_helper = BodyHelper()
        self.key_watch = KeyWatch(config.key_watch)
        self.reader = self._make_reader(config)
        journal_sessions = config.admin.journal_sessions if config.admin.is_enabled else 0
        self.journal = Journal(journal_sessions) if journal_sessions else None
        log = AccessLog(None if lines is None else lines.put)
        made = MadeObjects(self.sessions, self.shared.objects, self.reader.parser)
        self.recorder = Recorder(self.metrics, self.sessions, made, self.reader.parser, log, self.journal)
        self.recorder.logs_requests = config.log.access

    def _build_membership(self, config: Config) -> None:
        self.handover = Handover(
            config.fleet, self.fleet, self.router, self.sessions, self.pools, clock=self._clock
        )
        self.fleet.add_change_observer(self.handover.observe_change)
        self.membership = Membership(self.fleet, self.router, self.handover, self._environ)
        discovery = config.fleet.discovery
        self.discovery = Discovery(
            make_sources(discovery, self._environ),
            self.fleet,
            self._join_found,
            interval_s=discovery.interval_s,
            timeout_s=discovery.timeout_s,
        )

    def _named_backends(self) -> set[str]:
        """What the file and the sources name, removed by an operator or not."""
        return {backend.backend_id for backend in self.config.backends} | self.discovery.named

    def _join_found(self, settings: BackendSettings) -> None:
        """Discovery has found a backend, or a change of one."""
        backend_id = BackendId(settings.backend_id)
        is_new = backend_id not in self.fleet.view.backends
        self.membership.join(settings)
        if is_new:
            self.operator.obey(backend_id)

    def _build_proxy(self, config: Config) -> None:
        self.in_flight = RequestsInFlight()
        self.ledger = Ledger(self.router, self.recorder, clock=self._clock)
        self.tracing = _open_tracing(config)
        self.proxy_parts = ProxyParts(
            config=config,
            intake=self._make_intake(config),
            sessions=self.sessions,
            objects=self.shared.objects,
            router=self.router,
            fleet=self.fleet,
            pools=self.pools,
            prober=self.prober,
            metrics=self.metrics,
            recorder=self.recorder,
            handover=self.handover,
            admission=self.admission,
            in_flight=self.in_flight,
            ledger=self.ledger,
            tracing=self.tracing,
            retries=RetryBudget(config.failover),
            clock=self._clock,
        )
        self.proxy = Proxy(self.proxy_parts)

    def _build_admin(self, config: Config) -> None:
        self.admin_tokens = Tokens(
            operate=self._environ.get(config.admin.token_env),
            read=self._environ.get(config.admin.read_token_env),
        )
        self.admin_parts = AdminParts(
            config=lambda: self.config,
            fleet=self.fleet,
            operator=self.operator,
            router=self.router,
            sessions=self.sessions,
            parser=lambda: self.reader.parser,
            metrics=self.metrics,
            handover=self.handover,
            pools=self.pools,
            presence=self.shared.presence,
            journal=self.journal,
            tenant_named=lambda name: self.authentication.gatekeeper.directory.named(name),
            num_in_flight=lambda: len(self.in_flight),
            settle=self.ledger.drain,
            reload=self.reloader.reload,
            environ=self._environ,
            clock=self._clock,
        )

    def _build_front(self, config: Config) -> None:
        self.front = Front(self.proxy, self.fleet, self.metrics, config, clock=self._clock)
        self.front.degraded = functools.partial(_degraded_parts, self.sessions, self.fleet)
        self.front.debug_tokens = self.admin_tokens if self.admin_tokens.is_any else None

    def _gauge_sources(self, lines: LogWriter | None) -> GaugeSources:
        return GaugeSources(
            settle=self.ledger.drain,
            fleet=self.fleet,
            router=self.router,
            sessions=self.sessions,
            admission=self.admission,
            limiter=self.limiter,
            in_flight=self.in_flight,
            key_watch=self.key_watch,
            loop_lag=self.loop_lag,
            reloader=self.reloader,
            lines=lines,
        )

    # -- reload

    def prepare(self, config: Config) -> Prepared:
        """Build the parts that can fail. Raises ConfigError. Changes nothing."""
        self.membership.check(self.config.backends, config.backends)
        weights = {BackendId(backend.backend_id): backend.weight for backend in config.backends}
        Ring(weights, config.routing.virtual_nodes)  # computes the ring's points: `swap` finds them cached
        return Prepared(
            reader=self._make_reader(config),
            directory=self.authentication.make_directory(config),
            contexts=read_contexts(config),
        )

    async def swap(self, config: Config, prepared: Prepared) -> None:
        """Apply it. Certificates, which may fail, come first; orders to other replicas come last."""
        await self.servers.use(prepared.contexts)
        self.authentication.take_over(prepared.directory)  # key files may change without a changed option
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
        self.operator.reconfigure(config.fleet)
        self.reader = prepared.reader
        self._swap_proxy(before, config)
        changed = self.membership.apply(
            before.backends, config.backends, drain_deadline_s=config.fleet.drain_deadline_s
        )
        await self.operator.yield_to_configuration(
            {BackendId(backend.backend_id): backend.weight for backend in changed}
        )

    def _swap_proxy(self, before: Config, config: Config) -> None:
        """Running requests stay with the old proxy. Both proxies share all counters and learned state."""
        parts = self.proxy_parts
        self.key_watch.reconfigure(config.key_watch)
        parts.admission.reconfigure(config.limits)
        retries = parts.retries if config.failover == before.failover else RetryBudget(config.failover)
        self.proxy_parts = replace(parts, config=config, intake=self._make_intake(config), retries=retries)
        self.proxy = Proxy(self.proxy_parts)
        self.front.take_over(self.proxy, config)

    def _make_intake(self, config: Config) -> Intake:
        return Intake(
            reader=self.reader,
            key_watch=self.key_watch,
            gatekeeper=self.authentication.gatekeeper,
            limiter=self.limiter,
            spending=self.spending,
            store_budget=self.sessions.budget,
        )

    def _make_reader(self, config: Config) -> FactsReader:
        plan = ParserPlan(
            settings=config.keys,
            secret=key_secret(self._environ),
            max_decoded_bytes=config.downstream.max_body_bytes,
        )
        return FactsReader(
            plan,
            self.body_helper,
            inline_bytes=config.downstream.max_inline_body_bytes,
            is_suspect=self.key_watch.is_suspect,
        )


def _make_router(config: Config, recording: RecordingFile | None) -> Router:
    if recording is None:
        return Router(config.routing, policies=ALL_POLICIES)
    return RecordingRouter(config.routing, recording.write, policies=ALL_POLICIES)


def _degraded_parts(sessions: SessionStore, fleet: Fleet) -> list[str]:
    parts = {"session_store": sessions.stats().is_degraded, "backend_health": bool(fleet.spared)}
    return [name for name, is_degraded in parts.items() if is_degraded]


def _open_tracing(config: Config) -> Tracing | None:
    try:
        return open_tracing(config.tracing)
    except ValueError as error:
        raise ConfigError(str(error)) from error
