"""The composition root: builds one gateway from its configuration, runs it, takes it down in order.

Nothing else in the package constructs these parts, and none of them is global, so a test builds as many
gateways as it likes in one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import uvloop
from aiohttp import web

from gateway.admin.api import AdminApi, AdminParts, backend_of
from gateway.config import BackendSettings, Config, key_secret
from gateway.downstream.refusal import Refusal
from gateway.downstream.server import make_server
from gateway.fleet.discovery import Discovery
from gateway.fleet.discovery_sources import make_sources
from gateway.fleet.engine_metrics import EngineReport
from gateway.fleet.operator import Operator
from gateway.fleet.pools import UpstreamPools
from gateway.fleet.prober import Prober
from gateway.fleet.registry import Fleet, StateChange
from gateway.front import Front
from gateway.handover import Handover
from gateway.limits.admission import Admission
from gateway.logs import AccessLog, log_event
from gateway.loop_lag import LoopLag
from gateway.metrics import GatewayMetrics, status_label
from gateway.proxy import Proxy, ProxyParts
from gateway.record import Recorder
from gateway.replay.recording import RecordingRouter
from gateway.replica import ReplicaLink
from gateway.routing.router import Router
from gateway.sessions.open_store import open_load_board, open_order_board, open_store
from gateway.state_metrics import state_metrics
from gateway.values import Api, BackendId, BackendState, FleetView
from gateway.wire.facts import FactsParser

LEAVING_NOTICE_S = 0.2
"""How long the gateway answers `not ready` before it stops accepting, so that a balancer can notice."""


class Gateway:
    """One gateway process: `start`, serve, `stop`."""

    def __init__(
        self,
        config: Config,
        *,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        record_path: Path | None = None,
    ) -> None:
        self.config = config
        self._environ, self._clock = environ, clock
        secret = key_secret(environ)
        self.metrics = GatewayMetrics()
        self._recording = record_path.open("ab") if record_path is not None else None
        self.router = (
            Router(config.routing)
            if self._recording is None
            else RecordingRouter(config.routing, self._write_recording)
        )
        self.fleet = Fleet(config.health, on_view=self._on_view, on_change=self._on_change, clock=clock)
        self.sessions = open_store(config.sessions, clock=clock, environ=environ)
        self.operator = Operator(self.fleet, open_order_board(self.sessions), clock=clock)
        self.replica_link = ReplicaLink(
            self.router, open_load_board(self.sessions, clock=clock), self.operator, clock=clock
        )
        self.pools = UpstreamPools(self.fleet, config.upstream)
        discovery = config.fleet.discovery
        self.discovery = Discovery(
            make_sources(discovery, environ),
            self.fleet,
            self._join,
            interval_s=discovery.interval_s,
            timeout_s=discovery.timeout_s,
        )
        self.prober = Prober(self.fleet, self.pools, config.health, config.fleet, on_report=self._on_report)
        self.parser = FactsParser(config.keys, secret, max_decoded_bytes=config.downstream.max_body_bytes)
        access_log = AccessLog() if config.log.access else None
        self.recorder = Recorder(self.metrics, self.sessions, self.parser, access_log)
        self.handover = Handover(
            config.fleet, self.fleet, self.router, self.sessions, self.pools, clock=clock
        )
        self.admission = Admission(config.limits, clock=clock)
        self.proxy = Proxy(
            ProxyParts(
                config=config,
                parser=self.parser,
                sessions=self.sessions,
                router=self.router,
                fleet=self.fleet,
                pools=self.pools,
                metrics=self.metrics,
                recorder=self.recorder,
                handover=self.handover,
                admission=self.admission,
                clock=clock,
            )
        )
        self.front = Front(self.proxy, self.fleet, self.metrics, config, clock=clock)
        self.front.degraded = self._degraded
        self.loop_lag = LoopLag()
        self.metrics.add_state(lambda: state_metrics(self))
        self._runners: list[web.BaseRunner] = []
        self.port = self.admin_port = 0

    # -- life

    async def start(self) -> None:
        """Start everything and listen. Raises OSError when a port cannot be had; nothing is left running."""
        try:
            await self.sessions.start()
            for settings in self.config.backends:
                self._join(settings)
            self.discovery.start()
            self.loop_lag.start()
            if self.config.sessions.store == "redis":
                self.replica_link.start()
            server = make_server(self.front.handle, self.config.downstream, on_refusal=self._on_refusal)
            self.port = await self._listen(
                web.ServerRunner(server), self.config.listen.host, self.config.listen.port
            )
            if self.config.admin.is_enabled:
                runner = web.AppRunner(self._admin_application(), access_log=None)
                self.admin_port = await self._listen(runner, self.config.admin.host, self.config.admin.port)
        except BaseException:
            await self.stop(drain_timeout_s=0)
            raise
        log_event("gateway_started", port=self.port, admin_port=self.admin_port)

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Leave in order: not ready, no new connections, finish what runs, then close. Idempotent."""
        timeout_s = self.config.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        self.front.is_leaving = True
        if self._runners and timeout_s > 0:
            await asyncio.sleep(min(LEAVING_NOTICE_S, timeout_s))
            for runner in self._runners:
                for site in list(runner.sites):
                    await site.stop()
            await self._finish_running(timeout_s)
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()
        await self.discovery.close()
        await self.replica_link.close()
        await self.handover.close()
        await self.prober.close()
        await self.recorder.close()
        await self.pools.close()
        await self.sessions.close()
        self.loop_lag.stop()
        if self._recording is not None:
            self._recording.close()

    async def _finish_running(self, timeout_s: float) -> None:
        """Wait for running answers; at the deadline tell the streams in band why they end."""
        await self.proxy.wait_idle(timeout_s)
        if self.proxy.num_in_flight:
            log_event("drain_deadline", in_flight=self.proxy.num_in_flight)
            await self.proxy.end_all()

    async def _listen(self, runner: web.BaseRunner, host: str, port: int) -> int:
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, host, port, backlog=2048, reuse_port=self.config.workers > 1 or None)
        await site.start()
        return int(runner.addresses[0][1])

    def _admin_application(self) -> web.Application:
        parts = AdminParts(
            config=self.config,
            fleet=self.fleet,
            operator=self.operator,
            router=self.router,
            sessions=self.sessions,
            parser=self.parser,
            metrics=self.metrics,
            handover=self.handover,
            clock=self._clock,
        )
        token = self._environ.get(self.config.admin.token_env)
        return AdminApi(parts, token=token).application()

    def _write_recording(self, line: bytes) -> None:
        assert self._recording is not None
        self._recording.write(line + b"\n")

    def _join(self, settings: BackendSettings) -> None:
        """Add a backend, with its key from the environment."""
        api_key = self._environ.get(settings.api_key_env) if settings.api_key_env else None
        self.fleet.add(backend_of(settings), api_key=api_key)

    # -- what the fleet tells

    def _on_view(self, view: FleetView) -> None:
        self.metrics.keep_backends(view.backends.keys())
        self.router.observe_view(view, self._clock())
        self.pools.sync(view)
        self.prober.sync(view)

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
        self.metrics.errors["downstream", refusal.code] += 1.0

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

    def _degraded(self) -> list[str]:
        return ["session_store"] if self.sessions.stats().is_degraded else []


def serve(config: Config, record_path: Path | None = None) -> int:
    """Run one gateway until SIGTERM or SIGINT. A second signal ends it at once."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, record_path))


async def _serve(config: Config, record_path: Path | None) -> int:
    gateway = Gateway(config, record_path=record_path)
    await gateway.start()
    gc.collect()
    gc.freeze()  # what start-up made lives for ever: the collector need not look at it again
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await stop.wait()
    log_event("gateway_leaving", in_flight=gateway.proxy.num_in_flight)
    leaving = asyncio.ensure_future(gateway.stop())
    hurried = asyncio.ensure_future(hurry.wait())
    await asyncio.wait({leaving, hurried}, return_when=asyncio.FIRST_COMPLETED)
    if not leaving.done():
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        await gateway.stop(drain_timeout_s=0)
    hurried.cancel()
    log_event("gateway_stopped")
    return 0
