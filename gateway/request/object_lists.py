"""One list of the files, batches and the like that all backends keep.

Every backend that can be reached is asked, a few at a time and for a limited time. One that fails is left out
and named in `x-homing-incomplete`; the list fails only when all do. With tenants a list has what is known to
be the tenant's own, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from gateway.downstream.request import ClientRequest
from gateway.errors import NoBackend, NotFound, UpstreamError
from gateway.observability.logs import log_event
from gateway.observability.request_ids import RequestIds
from gateway.request.parts import ProxyParts
from gateway.tenants.credentials import RawHeader
from gateway.tenants.gatekeeper import Recognised
from gateway.tenants.tenant import Tenant
from gateway.values import Api, BackendId
from gateway.wire.headers import RequestHeads, bearer
from gateway.wire.object_lists import Wanted, cut, join, read_page, read_query
from gateway.wire.objects import Place, ids_in
from gateway.wire.routes import Route

MAX_CALLS: Final = 16
"""To backends at a time, over all lists."""
MAX_PAGES: Final = 20
"""Of one backend."""
TIMEOUT_S: Final = 5.0
"""For all pages of one backend."""
_MAX_PAGE_BYTES: Final = 4 << 20
_MAX_LOOK_UPS: Final = 64
"""In the store at a time."""
_NO_SUCH_API: Final = (404, 405, 501)

Objects = list[dict[str, Any]]


class ObjectLists:
    """Answers lists under one configuration."""

    def __init__(self, parts: ProxyParts) -> None:
        self._fleet, self._pools, self._made = parts.fleet, parts.pools, parts.recorder.made
        config = parts.config
        self._heads = RequestHeads(config.headers, passes_credentials=config.passes_client_credentials)
        self._passes_client_key = config.passes_client_key
        self._ids = RequestIds()
        self._room = asyncio.Semaphore(MAX_CALLS)

    async def read(
        self, request: ClientRequest, route: Route, recognised: Recognised, request_id: str
    ) -> tuple[dict[str, Any], list[BackendId]]:
        """Return the client's page, and the backends that are missing in it. Raises GatewayError."""
        tenant, credential = recognised
        if not self._passes_client_key:
            credential = None
        assert route.place is not None
        wanted = read_query(route.query)
        backends = [one for one in self._fleet.view.backends.values() if one.state.is_routable]
        if not backends:
            raise NoBackend("no backend is ready", retry_after_s=1)
        names = [backend.backend_id for backend in backends]
        answers = await asyncio.gather(
            *(self._ask(name, request, route, wanted, credential, request_id) for name in names),
            return_exceptions=True,
        )
        lists: dict[str, Objects] = {}
        missing = []
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, (UpstreamError, TimeoutError)):
                log_event("list_incomplete", level=logging.WARNING, backend=name, reason=str(answer)[:200])
                missing.append(name)
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                lists[name] = answer
        if not lists:
            if missing:
                raise NoBackend("no backend has told what it keeps", retry_after_s=1)
            raise NotFound("no backend serves this list")
        return await self._page(route.place, tenant, wanted, lists), missing

    async def _page(
        self, place: Place, tenant: Tenant, wanted: Wanted, lists: dict[str, Objects]
    ) -> dict[str, Any]:
        if tenant.is_known:
            lists = {name: await self._own(place, tenant, name, objects) for name, objects in lists.items()}
        joined = join(lists)
        makers = {one["id"]: BackendId(name) for name, one in joined}
        is_anthropic = place.kind.api is Api.MESSAGE_BATCHES
        page, answer = cut([one for _, one in joined], wanted, is_anthropic=is_anthropic)
        for described in page if tenant.is_known else ():  # the output of a batch, once there is one
            await self._learn(place, tenant, described, makers[described["id"]])
        return answer

    async def _own(self, place: Place, tenant: Tenant, name: str, objects: Objects) -> Objects:
        """Return those that the tenant is known to have had made by this backend."""
        store, own = self._made.store, []
        for start in range(0, len(objects), _MAX_LOOK_UPS):
            some = objects[start : start + _MAX_LOOK_UPS]
            keys = [self._made.key(tenant.name, place.kind.name, one["id"]) for one in some]
            homes = await asyncio.gather(*(store.get(key) for key in keys))
            own += [one for one, home in zip(some, homes, strict=True) if home and home.backend_id == name]
        return own

    async def _learn(self, place: Place, tenant: Tenant, described: dict[str, Any], maker: BackendId) -> None:
        backend = self._fleet.view.get(maker)
        made = ids_in(place.kind, described)[1:]
        keys = [self._made.key(tenant.name, kind, object_id) for kind, object_id in made]
        await self._made.claim(keys, (maker, 0 if backend is None else backend.epoch))

    async def _ask(
        self,
        name: BackendId,
        request: ClientRequest,
        route: Route,
        wanted: Wanted,
        credential: RawHeader | None,
        request_id: str,
    ) -> Objects | None:
        """Return all that a backend lists; None: it has no such list. Raises UpstreamError, TimeoutError."""
        is_anthropic = route.api is Api.MESSAGE_BATCHES or "anthropic-version" in request.headers
        cursor_name = "after_id" if is_anthropic else "after"
        found: dict[str, dict[str, Any]] = {}
        cursor = None
        async with self._room, asyncio.timeout(TIMEOUT_S):
            for _ in range(MAX_PAGES):
                target = f"{route.path}?{wanted.query(cursor_name, cursor)}"
                status, body = await self._get(name, request, target, credential, request_id)
                if status in _NO_SUCH_API and not found:
                    return None
                if status != 200:
                    raise UpstreamError(f"backend {name} answered {status}")
                objects, has_more = read_page(body)
                num_known = len(found)
                found |= {one["id"]: one for one in objects}
                if not has_more or len(found) == num_known:  # the same page again: it does not page
                    break
                cursor = objects[-1]["id"]
        return list(found.values())

    async def _get(
        self,
        name: BackendId,
        request: ClientRequest,
        target: str,
        credential: RawHeader | None,
        request_id: str,
    ) -> tuple[int, bytes]:
        pool = self._pools.get(name)
        head = self._heads.build(
            "GET",
            pool.address.path_prefix.decode() + target,
            request.raw_headers,
            host=pool.address.host_header.decode(),
            body_length=None,
            request_id=self._ids.for_engine(request_id),
            credential=bearer(self._fleet.api_key(name)) or credential,
        )
        exchange = await pool.open(head, b"", method="GET", replayable=True)
        try:
            return exchange.status, await exchange.read(_MAX_PAGE_BYTES)
        finally:
            exchange.abort()
