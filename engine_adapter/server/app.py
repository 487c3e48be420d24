"""The worker's HTTP routes and what all responses have in common.

Decides routing, the body limit and the echoed request id. Every failure is a JSON error, aiohttp's own 404,
405 and 413 included. A handler is cancelled when its client disconnects, which releases everything that it
holds in the engine. It does not know models.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web

from engine_adapter.server import information, kv_routes, messages_api, responses_api
from engine_adapter.server.chat import chat_completions
from engine_adapter.server.completions import completions
from engine_adapter.server.errors import ApiError, internal_error
from engine_adapter.server.serving import SERVER_STATE, ServerState

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,200}")  # safe to echo in a header

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(state: ServerState, *, max_body_bytes: int = MAX_BODY_BYTES) -> web.Application:
    """Build the application on the mutable state of the process."""
    app = web.Application(client_max_size=max_body_bytes, middlewares=[_every_answer])
    app[SERVER_STATE] = state
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.post("/v1/messages", messages_api.messages),
            web.post("/v1/messages/count_tokens", messages_api.count_tokens),
            web.post("/v1/responses", responses_api.create),
            web.get("/v1/responses/{response_id}", responses_api.retrieve),
            web.delete("/v1/responses/{response_id}", responses_api.delete),
            web.get("/v1/models", information.models),
            web.get("/v1/models/{model:.+}", information.model),
            web.post("/tokenize", information.tokenize),
            web.post("/detokenize", information.detokenize),
            web.post("/v1/kv/pins", kv_routes.create_pin),
            web.get("/v1/kv/pins", kv_routes.list_pins),
            web.get("/v1/kv/pins/{pin_id}", kv_routes.get_pin),
            web.delete("/v1/kv/pins/{pin_id}", kv_routes.delete_pin),
            web.get("/v1/kv/stats", kv_routes.stats),
            web.post("/v1/kv/explain", kv_routes.explain),
            web.get("/v1/kv/inventory", kv_routes.inventory),
            web.get("/v1/kv/tree", kv_routes.tree),
            web.post("/v1/kv/clear", kv_routes.clear),
            web.post("/reset_prefix_cache", kv_routes.clear),  # vLLM's name for it
            web.get("/live", information.live),
            web.get("/health", information.health),
            web.get("/ready", information.ready),
            web.get("/version", information.version),
            web.get("/metrics", information.metrics),
        ]
    )
    app.on_response_prepare.append(_echo_request_id)
    return app


@web.middleware
async def _every_answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Count the request while it runs, and turn every failure into a JSON error."""
    state = request.app[SERVER_STATE]
    state.enter()
    try:
        return await handler(request)
    except ApiError as error:
        return _error_response(request, error)
    except web.HTTPException as error:
        return _error_response(request, _from_framework(request, error))
    except ConnectionError:  # the client disconnected while we wrote
        raise
    except Exception:  # the request boundary: do not leak details of a bug
        logger.exception("request_failed")
        return _error_response(request, internal_error())
    finally:
        state.leave()


async def _echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Send a request id: the caller's, if it is safe to repeat, or a new one."""
    given = request.headers.get("X-Request-Id", "")
    response.headers["X-Request-Id"] = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    return web.Response(
        body=error.body(request.path),
        status=error.status,
        headers=error.headers,
        content_type="application/json",
    )


def _from_framework(request: web.Request, error: web.HTTPException) -> ApiError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allow = ", ".join(sorted(error.allowed_methods))
        return ApiError(
            405,
            f"{request.method} is not allowed here, only {allow}",
            code="method_not_allowed",
            headers={"Allow": allow},
        )
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, "no such path", code="not_found")
    return ApiError(error.status, error.reason, code="http_error")
