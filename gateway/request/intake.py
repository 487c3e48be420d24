"""Step 1 of a request: who asks, what is asked, and whether that may be asked.

In this order: the tenant, by its credentials, before a byte of the body is read; the body within limits, and
its facts; the models that this tenant may use; what it may use per minute. Each refusal is a GatewayError
while nothing was sent. Whoever calls `read` calls `settle` once, however the request ends.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.limits.allowance import estimated_tokens
from gateway.limits.tenant_limiter import Charge, TenantLimiter
from gateway.request.body_helper import FactsReader
from gateway.request.spending import Spending
from gateway.request.turn import Parked, Turn, Waiting
from gateway.routing.key_watch import KeyWatch
from gateway.tenants.gatekeeper import Gatekeeper
from gateway.tenants.tenant import Tenant
from gateway.values import RequestFacts, StoreBudget
from gateway.wire.facts import ParseOptions


class Intake:
    """Takes requests in under one configuration."""

    def __init__(
        self,
        *,
        reader: FactsReader,
        key_watch: KeyWatch,
        gatekeeper: Gatekeeper,
        limiter: TenantLimiter,
        spending: Spending,
        store_budget: Callable[[], StoreBudget | None],
    ) -> None:
        """`store_budget` returns how long a request that begins now may wait for the session store."""
        self._store_budget = store_budget
        self._reader, self._key_watch = reader, key_watch
        self._gatekeeper, self._limiter = gatekeeper, limiter
        self._spending = spending
        self.recognise, self.prove = gatekeeper.recognise, gatekeeper.prove

    def read(self, turn: Turn) -> Waiting | Parked | None:
        """Fill in the turn's tenant, body, facts and charge; what it waits for where it cannot do so at once.

        Asks who it is before the body is read. Raises GatewayError.
        """
        request = turn.request
        recognised = self._gatekeeper.recognise(request)
        if recognised is None:
            return self._prove(turn)
        turn.tenant, turn.credential = recognised
        return self._receive(turn)

    async def _prove(self, turn: Turn) -> None:
        turn.tenant, turn.credential = await self._gatekeeper.prove(turn.request)
        await turn.request.read_body()
        waiting = self._receive(turn)
        if waiting is not None:
            assert not isinstance(waiting, Parked), "the body is complete"
            await waiting

    def _receive(self, turn: Turn) -> Waiting | Parked | None:
        request = turn.request
        if not request.is_complete and not request.has_failed:
            request.receive(turn.resume)
            return Parked.PARKED
        turn.body = request.take_body()
        return self._understand(turn)

    def _understand(self, turn: Turn) -> Waiting | None:
        route, request = turn.route, turn.request
        options: ParseOptions = {
            "tenant": turn.tenant.name,
            "path": route.path,
            "query": route.query,
            "content_encoding": request.content_encoding,
        }
        facts = self._reader.read_here(route.api, request.raw_headers, turn.body, options)
        if facts is None:
            return self._understand_apart(turn, options)
        return self._judge(turn, facts)

    async def _understand_apart(self, turn: Turn, options: ParseOptions) -> None:
        """The body is large: another process reads it."""
        facts = await self._reader.read_apart(turn.route.api, turn.request.raw_headers, turn.body, options)
        waiting = self._judge(turn, facts)
        if waiting is not None:
            await waiting

    def _judge(self, turn: Turn, facts: RequestFacts) -> Waiting | None:
        tenant = turn.tenant
        tenant.check_request(facts)
        turn.facts = self._key_watch.judge(facts)
        turn.store_budget = self._store_budget()
        if not tenant.has_limits:
            return None
        if self._limiter.is_shared:
            return self._charge(turn)
        turn.charge = self._limiter.enter_here(tenant.name, tenant.limits, _expected_tokens(turn))
        return None

    async def _charge(self, turn: Turn) -> None:
        tenant = turn.tenant
        turn.charge = await self._limiter.enter(
            tenant.name, tenant.limits, _expected_tokens(turn), turn.store_budget
        )

    async def charge_list(self, tenant: Tenant) -> Charge | None:
        """Charge a list as one request that computes nothing, until `settle_list`. Raises TooManyRequests."""
        if not tenant.has_limits:
            return None
        if not self._limiter.is_shared:
            return self._limiter.enter_here(tenant.name, tenant.limits, 0)
        return await self._limiter.enter(tenant.name, tenant.limits, 0, self._store_budget())

    def settle_list(self, charge: Charge | None) -> None:
        if charge is not None:
            self._limiter.leave(charge, 0)

    def settle(self, turn: Turn) -> None:
        """Charge what the request really used."""
        if turn.charge is not None:
            self._limiter.leave(turn.charge, self._spending.settle(turn, turn.charge))


def _expected_tokens(turn: Turn) -> int:
    """Nothing for what computes nothing: counts, and what is asked about a stored object."""
    spends = not turn.route.is_count and not turn.facts.is_about_object
    return estimated_tokens(turn.facts) if spends else 0
