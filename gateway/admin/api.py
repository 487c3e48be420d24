"""The admin REST API: what the fleet is, where sessions live, why a request would go where.

Reading never changes anything; a dry run of a decision reserves nothing. Changes are idempotent: draining
a draining backend is a success. Sessions are named by their key (a hash) or looked up by the client's raw
id, which is hashed here and never stored, echoed or logged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from gateway.admin.access import make_guard, render_problems
from gateway.admin.describe import (
    FleetSources,
    describe_backend,
    describe_backends,
    describe_binding,
    describe_decision,
    describe_status,
)
from gateway.config import BackendSettings, Config, normalise_backend_url
from gateway.errors import BadRequest, NotFound
from gateway.fleet.operator import Operator
from gateway.fleet.registry import Fleet
from gateway.handover import Handover
from gateway.membership import backend_of
from gateway.metrics import GatewayMetrics
from gateway.routing.router import Router
from gateway.sessions.store import SessionStore
from gateway.values import Api, Backend, BackendId, SessionKey
from gateway.wire.facts import FactsParser
from gateway.wire.routes import RouteTable

MAX_PAGE = 1000
_T = TypeVar("_T")


class BackendPatch(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What may be changed on a backend."""

    weight: float


class DrainOrder(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How long bound sessions may take to leave."""

    deadline_s: float | None = None
    until_restart: bool = False
    """The order is for this life of the backend's process: once that has restarted, it is over."""


class MoveOrder(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Where a session shall live from now on."""

    backend: str


class RouteQuestion(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A request to be decided without being sent."""

    path: str = "/v1/chat/completions"
    headers: dict[str, str] = {}
    body: msgspec.Raw = msgspec.Raw(b"{}")
    tenant: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """What the admin API looks into."""

    config: Config
    fleet: Fleet
    operator: Operator
    router: Router
    sessions: SessionStore
    parser: FactsParser
    metrics: GatewayMetrics
    handover: Handover
    clock: Any


class AdminApi:
    """Builds the aiohttp application of the admin listener."""

    def __init__(self, parts: AdminParts, *, token: str | None) -> None:
        self._parts = parts
        self._token = token
        self._routes = RouteTable(parts.config.passthrough_paths)

    def reconfigure(self, config: Config, parser: FactsParser) -> None:
        """Show and use these from now on."""
        self._parts = replace(self._parts, config=config, parser=parser)

    def application(self) -> web.Application:
        app = web.Application(
            middlewares=[render_problems, make_guard(self._token)],
            client_max_size=self._parts.config.downstream.max_body_bytes,
        )
        v1 = "/admin/v1"
        app.add_routes(
            [
                web.get("/livez", self._live),
                web.get("/metrics", self._render_metrics),
                web.get(f"{v1}/status", self._status),
                web.get(f"{v1}/config", self._config),
                web.get(f"{v1}/backends", self._list_backends),
                web.post(f"{v1}/backends", self._add_backend),
                web.get(f"{v1}/backends/{{id}}", self._show_backend),
                web.patch(f"{v1}/backends/{{id}}", self._patch_backend),
                web.delete(f"{v1}/backends/{{id}}", self._remove_backend),
                web.post(f"{v1}/backends/{{id}}/cordon", self._cordon),
                web.post(f"{v1}/backends/{{id}}/drain", self._drain),
                web.post(f"{v1}/backends/{{id}}/undrain", self._undrain),
                web.get(f"{v1}/sessions", self._list_sessions),
                web.get(f"{v1}/sessions/{{key}}", self._show_session),
                web.delete(f"{v1}/sessions/{{key}}", self._end_session),
                web.post(f"{v1}/sessions/{{key}}/move", self._move_session),
                web.get(f"{v1}/ring", self._ring),
                web.post(f"{v1}/route", self._route),
            ]
        )
        return app

    # -- the whole

    async def _live(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _render_metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._parts.metrics.page(request.headers.get("accept", ""))
        return web.Response(body=body, headers={"content-type": content_type})

    async def _status(self, request: web.Request) -> web.Response:
        sessions = await self._parts.sessions.count_by_backend()
        return _json(describe_status(self._sources(), self._parts.sessions, sessions))

    async def _config(self, request: web.Request) -> web.Response:
        """The resolved configuration. It names the variables of secrets and holds none."""
        return _json(msgspec.to_builtins(self._parts.config))

    # -- backends

    async def _list_backends(self, request: web.Request) -> web.Response:
        sessions = await self._parts.sessions.count_by_backend()
        return _json({"backends": describe_backends(self._sources(), sessions)})

    async def _show_backend(self, request: web.Request) -> web.Response:
        sessions = await self._parts.sessions.count_by_backend()
        return _json(self._describe(self._backend(request), sessions))

    async def _add_backend(self, request: web.Request) -> web.Response:
        settings = await _read(request, BackendSettings)
        backend_id = BackendId(settings.backend_id)
        url = normalise_backend_url(settings.url)
        for other in self._backends():
            if other.base_url == url and other.backend_id != backend_id:
                raise BadRequest(f"backend {other.backend_id} has this url already", param="url")
        self._parts.fleet.add(backend_of(settings))
        await self._parts.operator.welcome(backend_id)
        return _json(self._describe(self._parts.fleet.view.backends[backend_id], {}), status=201)

    async def _patch_backend(self, request: web.Request) -> web.Response:
        backend = self._backend(request)
        patch = await _read(request, BackendPatch)
        if not 0 <= patch.weight <= 1000:
            raise BadRequest(f"weight must be 0..1000, got {patch.weight}", param="weight")
        await self._parts.operator.set_weight(backend.backend_id, patch.weight)
        return await self._show_backend(request)

    async def _remove_backend(self, request: web.Request) -> web.Response:
        await self._parts.operator.remove(self._backend(request).backend_id)
        return web.Response(status=204)

    async def _cordon(self, request: web.Request) -> web.Response:
        await self._parts.operator.cordon(self._backend(request).backend_id)
        return await self._show_backend(request)

    async def _drain(self, request: web.Request) -> web.Response:
        backend = self._backend(request)
        order = await _read(request, DrainOrder) if request.can_read_body else DrainOrder()
        default_s = self._parts.config.fleet.drain_deadline_s
        await self._parts.operator.drain(
            backend.backend_id,
            default_s if order.deadline_s is None else order.deadline_s,
            is_until_restart=order.until_restart,
        )
        return await self._show_backend(request)

    async def _undrain(self, request: web.Request) -> web.Response:
        await self._parts.operator.undrain(self._backend(request).backend_id)
        return await self._show_backend(request)

    def _backends(self) -> list[Backend]:
        return list(self._parts.fleet.view.backends.values())

    def _backend(self, request: web.Request) -> Backend:
        backend_id = BackendId(request.match_info["id"])
        backend = self._parts.fleet.view.get(backend_id)
        if backend is None:
            known = ", ".join(sorted(one.backend_id for one in self._backends())) or "none"
            raise NotFound(f"there is no such backend; known: {known}")
        return backend

    def _describe(self, backend: Backend, sessions: dict[BackendId, int]) -> dict[str, Any]:
        return describe_backend(backend, self._sources(), sessions, self._parts.router.snapshot())

    def _sources(self) -> FleetSources:
        parts = self._parts
        return FleetSources(
            fleet=parts.fleet, router=parts.router, metrics=parts.metrics, handover=parts.handover
        )

    # -- sessions

    async def _list_sessions(self, request: web.Request) -> web.Response:
        """`?backend=ID&cursor=…&limit=…`, or `?session_id=RAW&model=…&tenant=…` to find one."""
        query = request.query
        if "session_id" in query:
            key = self._key_of_raw_id(
                query["session_id"], query.get("model", ""), query.get("tenant", "default")
            )
            return _json({"sessions": await self._session_rows(key), "next_cursor": None})
        if "backend" not in query:
            raise BadRequest("name a backend, or a session_id and its model", param="backend")
        rows, cursor = await self._parts.sessions.list_by_backend(
            BackendId(query["backend"]), cursor=query.get("cursor"), limit=_limit(query.get("limit", "100"))
        )
        return _json({"sessions": [describe_binding(key, one) for key, one in rows], "next_cursor": cursor})

    def _key_of_raw_id(self, session_id: str, model: str, tenant: str) -> SessionKey:
        """The key that a request with this id in its header would have."""
        headers = [(b"x-session-id", session_id.encode("utf-8", "surrogateescape"))]
        body = msgspec.json.encode({"model": model, "messages": [{"role": "user", "content": "?"}]})
        facts = self._parts.parser.parse(Api.CHAT, headers, body, tenant=tenant)
        if facts.session_key is None:
            raise BadRequest("no session can have this id", param="session_id")
        return facts.session_key

    async def _session_rows(self, key: SessionKey) -> list[dict[str, Any]]:
        binding = await self._parts.sessions.get(key)
        return [] if binding is None else [describe_binding(key, binding)]

    async def _show_session(self, request: web.Request) -> web.Response:
        rows = await self._session_rows(_key(request))
        if not rows:
            raise NotFound("no session with this key is bound")
        return _json(rows[0])

    async def _end_session(self, request: web.Request) -> web.Response:
        await self._parts.sessions.end(_key(request))
        return web.Response(status=204)

    async def _move_session(self, request: web.Request) -> web.Response:
        key = _key(request)
        order = await _read(request, MoveOrder)
        backend = self._parts.fleet.view.get(BackendId(order.backend))
        if backend is None:
            raise BadRequest("there is no such backend", param="backend")
        binding = await self._parts.sessions.get(key)
        if binding is None:
            raise NotFound("no session with this key is bound")
        held = await self._parts.sessions.rebind(
            key, binding.version, backend.backend_id, backend.epoch, binding.context_tokens
        )
        return _json(describe_binding(key, held or binding))

    # -- decisions

    async def _ring(self, request: web.Request) -> web.Response:
        """`?key=…`: the owners of a key on the ring, first choice first."""
        key = request.query.get("key")
        if not key:
            raise BadRequest("give ?key=", param="key")
        num_owners = _limit(request.query.get("n", "3"))
        return _json({"key": key, "owners": self._parts.router.ring_owners(key, num_owners)})

    async def _route(self, request: web.Request) -> web.Response:
        """Decide a request and explain it, without sending or counting it."""
        question = await _read(request, RouteQuestion)
        route = self._routes.match("POST", question.path)
        headers = [(name.lower().encode(), value.encode()) for name, value in question.headers.items()]
        facts = self._parts.parser.parse(
            route.api, headers, bytes(question.body), tenant=question.tenant, path=route.path
        )
        binding = await self._parts.sessions.get(facts.session_key) if facts.session_key else None
        decision = self._parts.router.decide(facts, binding, self._parts.clock())
        return _json(describe_decision(facts, binding, decision))


async def _read(request: web.Request, kind: type[_T]) -> _T:
    """The JSON body as `kind`. Raises BadRequest that names the field."""
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadRequest(str(error)) from error


def _key(request: web.Request) -> SessionKey:
    return SessionKey(request.match_info["key"])


def _limit(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PAGE:
        raise BadRequest(f"limit must be 1..{MAX_PAGE}", param="limit")
    return int(text)


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")
