"""The data listener: what each path means here, and how every error looks to the client.

Most paths lead to the proxy. A few are answered by the gateway itself: health, the list of models (one
fleet, one list) and metrics. Every error, ours or unforeseen, ends as JSON in the dialect of the API that
was called; an unforeseen one is logged with its stack and told to the client only as an internal error.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from gateway.admin.access import Tokens
from gateway.downstream.cors import Cors, HeaderLines
from gateway.downstream.refusal import Refusal
from gateway.downstream.tunnel import wants_websocket
from gateway.errors import Forbidden, GatewayError, ModelNotFound, NoBackend
from gateway.fleet.registry import Fleet
from gateway.observability.metrics import GatewayMetrics, status_label
from gateway.request.proxy import Proxy
from gateway.request.request_debug import LEVEL_HEADER, is_asked_for
from gateway.request.settings import RequestConfig
from gateway.request.turn import Turn
from gateway.tenants.tenant import Tenant
from gateway.values import Api
from gateway.wire.error_bodies import error_response
from gateway.wire.headers import clean_request_id
from gateway.wire.routes import Route, RouteTable, dialect_of

_encode = msgspec.json.encode
_JSON = "application/json"


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
        self._id_prefix, self._id_numbers = f"req-{secrets.token_hex(8)}-", itertools.count(1)
        self.is_leaving = False
        self.degraded: Callable[[], list[str]] = list
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

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request. Never raises anything but cancellation."""
        if request.method == "OPTIONS":
            return self._answer_options(request)
        response = await self._answer(request)
        return self._permit(request, response) if isinstance(response, web.Response) else response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        local = self._local.get(request.path)
        if local is not None and request.method in ("GET", "HEAD"):
            return local(request)
        request_id = clean_request_id(request.headers.get("x-request-id")) or self._new_request_id()
        api: Api | None = None
        turn: Turn | None = None
        try:
            route = self._routes.match(request.method, request.raw_path)
            api = route.api
            if api is Api.MODELS:
                answer = self._answer_models(route, await self._proxy.intake.tenant_of(request))
                answer.headers["x-request-id"] = request_id
                self._count(api, answer.status, None)
                return answer
            is_upgrade = api is Api.REALTIME and self._asks_for_websocket(request)
            turn = Turn(
                request_id=request_id,
                api=api,
                target=route.target,
                is_upgrade=is_upgrade,
                started_s=self._clock(),
            )
            if self.debug_tokens is not None and LEVEL_HEADER in request.headers:
                turn.is_debug = is_asked_for(request.headers, self.debug_tokens)
            if self._cors is not None:
                turn.cors_headers = _encoded(self._cors.answer_headers(request.headers.get("origin")))
            return await self._proxy.serve(request, route, turn)
        except GatewayError as error:
            refusal = error
        except Exception:
            logging.getLogger(__name__).exception("unforeseen error in request %s", request_id)
            refusal = GatewayError("internal error of the gateway")
        refusal.__traceback__ = None  # it leads to this frame, which knows the error: a cycle with the body
        if turn is None:
            self._count(api or Api.OTHER, refusal.status, refusal)
        return self._refuse(api or dialect_of(request.raw_path), refusal, request_id)

    def _count(self, api: Api, status: int, error: GatewayError | Refusal | None) -> None:
        """Of a request that never became a turn: nobody else counts it."""
        self._metrics.requests[api.value, status_label(status)] += 1.0
        if error is not None:
            self._metrics.errors[error.source, error.code] += 1.0

    def count_refusal(self, refusal: Refusal) -> None:
        """Count a request that the server refused itself: unparsable, or with too large a head."""
        self._count(Api.OTHER, refusal.status, refusal)

    def _asks_for_websocket(self, request: web.BaseRequest) -> bool:
        """Raises Forbidden for a page of another origin: browsers ask nobody before they open a WebSocket."""
        origin = request.headers.get("origin")
        if not wants_websocket(request):
            return False
        if self._cors is not None and origin is not None and not self._cors.permits(origin):
            raise Forbidden("pages of this origin may not open a WebSocket here (downstream.cors)")
        return True

    def _answer_options(self, request: web.BaseRequest) -> web.Response:
        """Tell which methods a path takes (RFC 9110, 9.3.7), and browsers what pages may send there."""
        try:
            methods = (*self._methods(request), "OPTIONS")
        except GatewayError as error:
            return self._permit(
                request, self._refuse(dialect_of(request.raw_path), error, self._new_request_id())
            )
        response = web.Response(status=204, headers={"allow": ", ".join(methods)})
        if self._cors is None or "access-control-request-method" not in request.headers:
            return self._permit(request, response)
        asked = request.headers.get("access-control-request-headers")
        origin = request.headers.get("origin")
        response.headers.extend(self._cors.preflight_headers(origin, asked, methods))
        return response

    def _methods(self, request: web.BaseRequest) -> tuple[str, ...]:
        if request.path in self._local:
            return ("GET", "HEAD")
        return self._routes.lookup(request.raw_path).methods

    def _permit(self, request: web.BaseRequest, response: web.Response) -> web.Response:
        """Let pages of the allowed origins read an answer of ours."""
        if self._cors is not None:
            response.headers.extend(self._cors.answer_headers(request.headers.get("origin")))
        return response

    def _new_request_id(self) -> str:
        """Unique, not secret: asking the system for random bytes each time costs more than a lookup."""
        return f"{self._id_prefix}{next(self._id_numbers):x}"

    def _refuse(self, api: Api, error: GatewayError, request_id: str) -> web.Response:
        status, body, headers = error_response(api, error)
        response = web.Response(status=status, body=body, headers=headers)
        response.headers["x-request-id"] = request_id
        return response

    # -- answered here

    def _live(self, request: web.BaseRequest) -> web.Response:
        """The process runs. Depends on nothing else: a restart would cure nothing else."""
        return _json({"status": "ok"})

    def _ready(self, request: web.BaseRequest) -> web.Response:
        """May this replica get traffic? A degraded store does not change the answer: routing goes on."""
        num_ready = sum(backend.state.keeps_sessions for backend in self._fleet.view.backends.values())
        is_ready = num_ready > 0 and not self.is_leaving
        reason = "leaving" if self.is_leaving else None if num_ready else "no backend is ready"
        body = {"ready": is_ready, "backends_ready": num_ready, "degraded": self.degraded(), "reason": reason}
        return _json(body, status=200 if is_ready else 503)

    def _render_metrics(self, request: web.BaseRequest) -> web.Response:
        body, content_type = self._metrics.page(request.headers.get("accept", ""))
        return web.Response(body=body, headers={"content-type": content_type})

    def _answer_models(self, route: Route, tenant: Tenant) -> web.Response:
        """The union of what the reachable backends serve; one that is down never breaks the list."""
        models = {model for model in self._models() if tenant.may_use(model)}
        if route.path == "/v1/models":
            if not any(backend.state.is_routable for backend in self._fleet.view.backends.values()):
                raise NoBackend("no backend is ready", retry_after_s=1)
            return _json({"object": "list", "data": [_model_card(model) for model in sorted(models)]})
        model = route.path.removeprefix("/v1/models/")
        if model not in models:
            raise ModelNotFound(f"The model `{model}` does not exist on any backend.", param="model")
        return _json(_model_card(model))

    def _models(self) -> set[str]:
        return {
            model
            for backend in self._fleet.view.backends.values()
            if backend.state.is_routable
            for model in backend.models or ()
        }


def _model_card(model: str) -> dict[str, object]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "homing"}


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=_encode(body), content_type=_JSON)


def _encoded(headers: HeaderLines) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.encode(), value.encode()) for name, value in headers)
