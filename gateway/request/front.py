"""The data listener: what each path means here, and how every error looks to the client.

Most paths lead to the proxy. A few are answered by the gateway itself: health, the list of models (one
fleet, one list) and metrics. Every error, ours or unforeseen, ends as JSON in the dialect of the API that
was called; an unforeseen one is logged with its stack and told to the client only as an internal error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import parse_qs

import msgspec

from gateway.downstream.cors import Cors, HeaderLines
from gateway.downstream.refusal import Refusal
from gateway.downstream.request import ClientRequest
from gateway.downstream.tunnel import wants_websocket
from gateway.errors import Forbidden, GatewayError, ModelNotFound, NoBackend, UpgradeRequired, shown
from gateway.fleet.model_list import ModelCard
from gateway.fleet.registry import Fleet
from gateway.observability.metrics import GatewayMetrics, status_label
from gateway.observability.request_ids import RequestIds
from gateway.request.operator_tokens import Tokens
from gateway.request.proxy import Proxy
from gateway.request.refuse import log_fault, refuse
from gateway.request.request_debug import is_asked_for
from gateway.request.settings import RequestConfig
from gateway.request.turn import Turn
from gateway.tenants.gatekeeper import Recognised
from gateway.tenants.tenant import Tenant
from gateway.values import Api, AttemptOutcome
from gateway.wire.headers import clean_request_id
from gateway.wire.routes import Route, RouteTable, dialect_of

_encode = msgspec.json.encode
_JSON: Final = ("content-type", "application/json")
_GET: Final = ("GET", "HEAD")


class Front:
    """Routes requests of the data listener."""

    def __init__(
        self,
        proxy: Proxy,
        fleet: Fleet,
        metrics: GatewayMetrics,
        config: RequestConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._metrics, self._clock = fleet, metrics, clock
        self.take_over(proxy, config)
        self._ids = RequestIds()
        self.is_leaving = False
        self.degraded: Callable[[], list[str]] = list
        self._tasks: set[asyncio.Task[None]] = set()  # lists: of objects, and of models that wait for a proof
        self.debug_tokens: Tokens | None = None  # None: nobody may ask for a request to be told in full
        self._local = {
            "/health": self._live,
            "/healthz": self._live,
            "/livez": self._live,
            "/ready": self._ready,
            "/readyz": self._ready,
            "/metrics": self._render_metrics,
        }

    def take_over(self, proxy: Proxy, config: RequestConfig) -> None:
        """Serve requests that begin from now on with this proxy, and with the paths of this configuration."""
        self._proxy = proxy
        self._routes = RouteTable(config.passthrough_paths)
        self._cors = Cors(config.downstream.cors) if config.downstream.cors is not None else None

    def handle(self, request: ClientRequest) -> None:
        """Answer one request, now or later. Never raises."""
        if request.method in _GET:
            local = self._local.get(request.path)
            if local is not None:
                local(request)
                return
        elif request.method == "OPTIONS":
            self._answer_options(request)
            return
        self._serve(request)

    def _serve(self, request: ClientRequest) -> None:
        """Hand the request to the proxy, or answer it from what the fleet is known to serve."""
        given = clean_request_id(request.request_id)
        request_id = given or self._ids.new()
        api: Api | None = None
        try:
            if request.method == "GET" and wants_websocket(request):
                self._check_upgrade(request)
            route = self._routes.match(request.method, request.raw_path)
            api = route.api
            if api is Api.MODELS:
                self._serve_models(request, route, request_id)
                return
            if route.place is not None and route.place.is_collection and request.method in _GET:
                self._list_later(request, route, request_id)
                return
            turn = Turn(
                request=request,
                route=route,
                request_id=request_id,
                engine_request_id=request_id if given is None else self._ids.for_engine(given),
                started_s=self._clock(),
                is_upgrade=api is Api.REALTIME and self._asks_for_websocket(request),
                cors_headers=self._cors_headers(request),
            )
            if request.asks_for_level and self.debug_tokens is not None:
                turn.is_debug = is_asked_for(request.headers, self.debug_tokens)
        except Exception as error:
            self._refuse(request, api, error, request_id)
        else:
            self._proxy.serve(turn)

    def _check_upgrade(self, request: ClientRequest) -> None:
        """Raise UpgradeRequired for a WebSocket on a path that takes none, NotFound for an unknown path."""
        route = self._routes.lookup(request.raw_path)
        if route.api is not Api.REALTIME:
            raise UpgradeRequired(f"{route.path} takes no WebSocket; use {', '.join(route.methods)}")

    def _refuse(self, request: ClientRequest, api: Api | None, error: Exception, request_id: str) -> None:
        """Answer a request that never became a turn: nobody else counts it."""
        if not isinstance(error, GatewayError):
            log_fault(request_id, error)
            error = GatewayError("internal error of the gateway")
        error.forget_origin()
        self._count(api or Api.OTHER, error.status, error)
        cors_headers = self._cors_headers(request)
        refuse(request, api or dialect_of(request.raw_path), error, request_id, cors_headers)

    def _count(self, api: Api, status: int, error: GatewayError | Refusal | None) -> None:
        """Of a request that never became a turn: nobody else counts it."""
        outcome = AttemptOutcome.COMPLETE if error is None else AttemptOutcome.NOT_SENT
        self._metrics.requests[api.value, status_label(status), outcome.value] += 1.0
        if error is not None:
            self._metrics.errors[error.source, error.code] += 1.0

    def count_refusal(self, refusal: Refusal) -> None:
        """Count a request that the server refused itself: unparsable, or with too large a head."""
        self._count(Api.OTHER, refusal.status, refusal)

    def _asks_for_websocket(self, request: ClientRequest) -> bool:
        """Raises Forbidden for a page of another origin: browsers ask nobody before they open a WebSocket."""
        origin = request.headers.get("origin")
        if not wants_websocket(request):
            return False
        if self._cors is not None and origin is not None and not self._cors.permits(origin):
            raise Forbidden("pages of this origin may not open a WebSocket here (downstream.cors)")
        return True

    def _answer_options(self, request: ClientRequest) -> None:
        """Tell which methods a path takes (RFC 9110, 9.3.7), and browsers what pages may send there."""
        cors_headers = self._cors_headers(request)
        try:
            methods = (*self._methods(request), "OPTIONS")
        except GatewayError as error:
            refuse(request, dialect_of(request.raw_path), error, self._ids.new(), cors_headers)
            return
        headers = [("allow", ", ".join(methods)), *cors_headers]
        if self._cors is not None and "access-control-request-method" in request.headers:
            asked = request.headers.get("access-control-request-headers")
            origin = request.headers.get("origin")
            headers = [headers[0], *self._cors.preflight_headers(origin, asked, methods)]
        request.answer(204, headers)

    def _methods(self, request: ClientRequest) -> tuple[str, ...]:
        if request.path in self._local:
            return _GET
        return self._routes.lookup(request.raw_path).methods

    def _cors_headers(self, request: ClientRequest) -> HeaderLines:
        """Let pages of the allowed origins read an answer."""
        if self._cors is None:
            return ()
        return self._cors.answer_headers(request.headers.get("origin"))

    # -- answered here

    def _live(self, request: ClientRequest) -> None:
        """The process runs. Depends on nothing else: a restart would cure nothing else."""
        self._answer_json(request, {"status": "ok"})

    def _ready(self, request: ClientRequest) -> None:
        """May this replica get traffic? The engines' health does not change the answer, but in its first
        moments, when it knows none of them, nor does a degraded store: the gateway answers all the same.
        `?min_backends=1` asks for ready backends too.
        """
        num_ready = sum(backend.state.keeps_sessions for backend in self._fleet.view.backends.values())
        reason = None
        if self.is_leaving:
            reason = "leaving"
        elif not self._fleet.has_settled:
            reason = "starting: no backend is ready yet"
        elif num_ready < _min_backends(request.raw_path):
            reason = "fewer backends are ready than were asked for"
        is_ready = reason is None
        body = {"ready": is_ready, "backends_ready": num_ready, "degraded": self.degraded(), "reason": reason}
        self._answer_json(request, body, status=200 if is_ready else 503)

    def _render_metrics(self, request: ClientRequest) -> None:
        body, content_type = self._metrics.page(request.headers.get("accept", ""))
        request.answer(200, [("content-type", content_type), *self._cors_headers(request)], body)

    def _answer_json(
        self, request: ClientRequest, body: object, *, status: int = 200, request_id: str | None = None
    ) -> None:
        headers = [_JSON, *self._cors_headers(request)]
        if request_id is not None:
            headers.append(("x-request-id", request_id))
        request.answer(status, headers, _encode(body))

    def _serve_models(self, request: ClientRequest, route: Route, request_id: str) -> None:
        """Answer at once, or when the tenant's credentials have been proved."""
        recognised = self._proxy.intake.recognise(request)
        if recognised is not None:
            self._answer_models(request, route, recognised[0], request_id)
            return
        self._list_later(request, route, request_id)

    def _list_later(self, request: ClientRequest, route: Route, request_id: str) -> None:
        task = asyncio.get_running_loop().create_task(self._prove_and_list(request, route, request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        request.on_gone = task.cancel

    async def _prove_and_list(self, request: ClientRequest, route: Route, request_id: str) -> None:
        try:
            recognised = self._proxy.intake.recognise(request) or await self._proxy.intake.prove(request)
            if route.place is not None:
                await self._answer_objects(request, route, recognised, request_id)
            else:
                request.on_gone = None
                self._answer_models(request, route, recognised[0], request_id)
        except Exception as error:
            request.on_gone = None
            self._refuse(request, route.api, error, request_id)

    async def _answer_objects(
        self, request: ClientRequest, route: Route, recognised: Recognised, request_id: str
    ) -> None:
        """What the reachable backends keep, of this tenant; who could not be asked is told in a header."""
        proxy = self._proxy
        charge = await proxy.intake.charge_list(recognised[0])
        try:
            answer, missing = await proxy.lists.read(request, route, recognised, request_id)
        finally:
            proxy.intake.settle_list(charge)
        request.on_gone = None
        self._count(route.api, 200, None)
        headers = [_JSON, *self._cors_headers(request), ("x-request-id", request_id)]
        headers += [("x-homing-incomplete", ",".join(missing))] if missing else []
        request.answer(200, headers, _encode(answer))

    def _answer_models(self, request: ClientRequest, route: Route, tenant: Tenant, request_id: str) -> None:
        """The union of what the reachable backends serve; one that is down never breaks the list."""
        cards = {model: card for model, card in self._fleet.model_cards().items() if tenant.may_use(model)}
        if route.path == "/v1/models":
            if not any(backend.state.is_routable for backend in self._fleet.view.backends.values()):
                raise NoBackend("no backend is ready", retry_after_s=1)
            answer: object = {"object": "list", "data": [_described(cards[model]) for model in sorted(cards)]}
        else:
            model = route.path.removeprefix("/v1/models/")
            if model not in cards:
                raise ModelNotFound(f"The model `{shown(model)}` is on no backend.", param="model")
            answer = _described(cards[model])
        self._count(Api.MODELS, 200, None)
        self._answer_json(request, answer, request_id=request_id)


def _min_backends(target: str) -> int:
    wanted = parse_qs(target.partition("?")[2]).get("min_backends", ["0"])[-1]
    return int(wanted) if wanted.isdecimal() and len(wanted) < 10 else 0


def _described(card: ModelCard) -> dict[str, object]:
    """Return a model as clients know it from the engines, who name its length like this."""
    told = {"root": card.root, "parent": card.parent, "max_model_len": card.context_tokens}
    known = {name: value for name, value in told.items() if value is not None}
    return {"id": card.id, "object": "model", "created": card.created, "owned_by": "homing", **known}
