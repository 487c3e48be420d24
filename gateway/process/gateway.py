"""The life of one gateway: start everything in order, and stop everything in order."""

from __future__ import annotations

import asyncio
import contextlib

from gateway.admin.api import AdminApi
from gateway.downstream.server import ClientServer
from gateway.observability.logs import log_event
from gateway.process.parts import GatewayParts
from gateway.process.servers import read_contexts
from gateway.values import BackendState, FleetView

FIRST_LOOK_S = 1.0
"""How long a start waits for backends: until they are known, requests would be refused or leave home."""
LAST_REQUESTS_S = 0.2
"""How long connections that are already open may take to send their last requests."""


class Gateway(GatewayParts):
    """One gateway process: `start`, serve, `stop`. `GatewayParts` says what it is made of."""

    async def start(self) -> None:
        """Start everything and listen. Raises OSError if a port is not available; nothing is left running."""
        try:
            await self.sessions.start()
            await self.shared.objects.start()
            self.membership.apply((), self.config.backends)
            await self.operator.learn()  # so that nothing is served against an order
            self.discovery.start()
            self.loop_lag.start()
            self.authentication.start()
            if self.shared.tenant_use is not None:
                self.shared.tenant_use.start(self.limiter.num_in_flight)
            if self.worker_reports is not None:
                self.worker_reports.start(self.metrics.own_families)
            self.replica_sync.start()
            contexts = read_contexts(self.config)
            await self._look_at_backends()
            server = ClientServer(
                self.front.handle, self.config.downstream, on_refusal=self.front.count_refusal
            )
            self.port = await self.servers.open_data(server, self.config, contexts)
            if self.config.admin.is_enabled:
                application = AdminApi(self.admin_parts, tokens=self.admin_tokens).application()
                self.admin_port = await self.servers.open_admin(application, self.config, contexts)
        except BaseException:
            await self.stop(drain_timeout_s=0)
            raise
        log_event("gateway_started", port=self.port, admin_port=self.admin_port)

    async def stop(self, drain_timeout_s: float | None = None, *, with_notice: bool = True) -> None:
        """Stop in order: not ready, no new connections, finish running requests, close. Idempotent.

        The port closes before the requests end: a balancer without health checks of its own goes elsewhere
        only where it is refused.
        """
        timeout_s = self.config.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        notice_s = self.config.leaving_notice_s if with_notice and timeout_s > 0 else 0.0
        self.front.is_leaving = True
        self.servers.leave()
        if self.servers.is_open:
            await asyncio.sleep(notice_s)
            await self.servers.stop_accepting_clients()
            await asyncio.sleep(min(LAST_REQUESTS_S, timeout_s))
            await self._finish_running(timeout_s)
        await self.servers.close()
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
        if self.shared.tenant_use is not None:
            await self.shared.tenant_use.close()
        await self.shared.objects.close()
        await self.sessions.close()
        self.loop_lag.stop()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        if self.worker_reports is not None:
            self.worker_reports.stop()
        if self.recording is not None:
            self.recording.close()

    async def _look_at_backends(self) -> None:
        """Wait until each backend has been found well, but no longer than `FIRST_LOOK_S`."""
        all_known = asyncio.Event()

        def look(view: FleetView) -> None:
            if not any(backend.state is BackendState.JOINING for backend in view.backends.values()):
                all_known.set()

        self.fleet.add_view_observer(look)
        look(self.fleet.view)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(all_known.wait(), FIRST_LOOK_S)

    async def _finish_running(self, timeout_s: float) -> None:
        """Wait for running answers. At the deadline, streams that still run end with an error event."""
        if timeout_s > 0:
            await self.in_flight.wait_idle(timeout_s)
        if len(self.in_flight):
            log_event("drain_deadline", in_flight=len(self.in_flight))
            await self.in_flight.end_all()
