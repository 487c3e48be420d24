"""The admin listener: the operations under `/admin/v1`, the OpenAPI document, liveness, metrics, the
dashboard.

Reads change nothing, and a dry run of a decision reserves nothing. Changes are idempotent. They are
conditional if the caller sends `If-Match`, which is never required: an operator who drains a backend from a
shell means it. Each operation is a typed function in one of the `*_operations` modules.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from gateway.admin.access import Guard, make_problem_middleware
from gateway.admin.dashboard_files import DashboardFiles
from gateway.admin.decision_operations import DecisionOperations
from gateway.admin.fleet_operations import FleetOperations
from gateway.admin.openapi import openapi_document
from gateway.admin.operations import Operation
from gateway.admin.parts import AdminParts
from gateway.admin.pin_operations import PinOperations
from gateway.admin.process_operations import ProcessOperations
from gateway.admin.session_operations import SessionOperations
from gateway.observability.logs import log_event
from gateway.request.operator_tokens import Tokens

PREFIX = "/admin/v1"
Handler = Callable[[web.Request], Awaitable[web.Response]]


class AdminApi:
    """Builds the aiohttp application of the admin listener."""

    def __init__(self, parts: AdminParts, *, tokens: Tokens) -> None:
        self._parts = parts
        self._guard = Guard(tokens, allowed_hosts=parts.config().admin.allowed_hosts)
        self._pins = PinOperations(parts)
        self.operations: list[Operation] = [
            *FleetOperations(parts).operations(),
            *SessionOperations(parts).operations(),
            *DecisionOperations(parts).operations(),
            *self._pins.operations(),
            *ProcessOperations(parts).operations(),
        ]

    def application(self) -> web.Application:
        app = web.Application(
            middlewares=[make_problem_middleware()],
            client_max_size=self._parts.config().downstream.max_body_bytes,
        )
        app.cleanup_ctx.append(self._pins.keep_standing)
        app.router.add_get("/livez", self._live)
        app.router.add_get("/metrics", self._render_metrics)
        app.router.add_get("/admin/openapi.json", self._openapi)
        DashboardFiles().add_routes(app)
        for operation in self.operations:
            app.router.add_route(operation.method, PREFIX + operation.path, self._guarded(operation))
        return app

    def _guarded(self, operation: Operation) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            self._guard.check(request, is_change=operation.is_change)
            self._parts.settle()
            response = await operation.run(request)
            if operation.is_change:
                target = dict(request.match_info)
                log_event("admin_change", operation=operation.name, target=target, by=request.remote)
            return response

        return handle

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _render_metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._parts.metrics.page(request.headers.get("accept", ""))
        return web.Response(body=body, headers={"content-type": content_type})

    async def _openapi(self, request: web.Request) -> web.Response:
        self._guard.check(request, is_change=False)
        document = openapi_document(self.operations, PREFIX)
        return web.Response(body=msgspec.json.encode(document), content_type="application/json")
