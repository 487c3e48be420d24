"""Step 1 of a request: who asks, what is asked, and whether that may be asked.

In this order: the tenant, by its credentials, before a byte of the body is read; the body within limits, and
its facts; the models that this tenant may use; what it may use per minute. Each refusal is a GatewayError
while nothing was sent. Whoever calls `take_in` calls `settle` once, however the request ends.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from gateway.downstream.body import read_body
from gateway.limits.allowance import estimated_tokens
from gateway.limits.tenant_limiter import TenantLimiter
from gateway.request.body_helper import FactsReader
from gateway.request.settings import RequestConfig
from gateway.request.turn import Turn
from gateway.routing.key_watch import KeyWatch
from gateway.tenants.gatekeeper import Gatekeeper
from gateway.tenants.tenant import Tenant
from gateway.wire.facts import ParseOptions
from gateway.wire.routes import Route


class Intake:
    """Takes requests in under one configuration."""

    def __init__(
        self,
        config: RequestConfig,
        *,
        reader: FactsReader,
        key_watch: KeyWatch,
        gatekeeper: Gatekeeper,
        limiter: TenantLimiter,
        store_deadline: Callable[[], float],
    ) -> None:
        """`store_deadline` says until when a request that begins now may wait for the session store."""
        self._settings, self._store_deadline = config.downstream, store_deadline
        self._reader, self._key_watch = reader, key_watch
        self._gatekeeper, self._limiter = gatekeeper, limiter

    async def tenant_of(self, request: web.BaseRequest) -> Tenant:
        """Who asks. Raises Unauthorized, Forbidden or CannotAuthenticate."""
        return self._gatekeeper.recognise(request) or await self._gatekeeper.prove(request)

    async def take_in(self, request: web.BaseRequest, route: Route, turn: Turn) -> None:
        """Fill in the turn's tenant, body, facts and charge."""
        gatekeeper = self._gatekeeper
        turn.tenant = tenant = gatekeeper.recognise(request) or await gatekeeper.prove(request)
        turn.body = await read_body(request, self._settings)
        options: ParseOptions = {
            "tenant": tenant.name,
            "path": route.path,
            "query": route.query,
            "content_encoding": request.headers.get("content-encoding"),
        }
        facts = await self._reader.read(route.api, request.raw_headers, turn.body, options)
        tenant.check_request(facts)
        turn.facts = self._key_watch.judge(facts)
        turn.store_deadline_s = self._store_deadline()
        if tenant.has_limits:
            turn.charge = await self._limiter.enter(
                tenant.name, tenant.limits, estimated_tokens(facts), turn.store_deadline_s
            )

    def settle(self, turn: Turn) -> None:
        """Charge what the request really used."""
        if turn.charge is not None:
            self._limiter.leave(turn.charge, turn.used_tokens)
