"""Who may use the admin API, and how its errors look (RFC 9457 problem details).

With a token configured, every request needs it as a bearer token, compared in constant time. Without one,
only loopback peers are served, and only requests that no browser page of another origin can make: a JSON
content type on every change, so a form post from a web page is refused before it is read.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.errors import Forbidden, GatewayError, Unauthorized, UnsupportedMediaType

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset({"/livez", "/readyz", "/metrics"})


def make_guard(token: str | None) -> Middleware:
    """A middleware that admits or refuses."""
    expected = token.encode() if token else None

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            if expected is not None:
                _require_token(request, expected)
            elif not _is_loopback(request.remote):
                raise Forbidden("no admin token is set, so the admin API serves loopback only")
            if request.can_read_body and request.content_type != "application/json":
                raise UnsupportedMediaType("send application/json")
        return await handler(request)

    return guard


def _require_token(request: web.Request, expected: bytes) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), expected):
        raise Unauthorized("the admin API needs its token: Authorization: Bearer …")


def _is_loopback(remote: str | None) -> bool:
    try:
        return remote is not None and ipaddress.ip_address(remote).is_loopback
    except ValueError:
        return False


@web.middleware
async def render_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into problem details, aiohttp's own 404 and 405 included."""
    try:
        return await handler(request)
    except GatewayError as error:
        headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
        return problem(error.status, error.code, error.message, headers)
    except web.HTTPException as error:
        headers = {"allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return problem(error.status, error.reason.lower().replace(" ", "_"), error.reason, headers)


def problem(status: int, code: str, detail: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"type": "about:blank", "title": code.replace("_", " "), "status": status, "code": code}
    body["detail"] = detail
    return web.Response(
        status=status,
        body=msgspec.json.encode(body),
        headers={"content-type": "application/problem+json", **(headers or {})},
    )
