"""Access control of the admin API, and its error format (RFC 9457 problem details).

There are two roles: `read`, and `operate`, which may also make changes. If a token is configured, every
request must send one as a bearer token. There are no cookies, so a browser never adds a token by itself. If
no token is configured, only loopback peers are served, and only requests that a page of another origin cannot
make:

* the `Host` must be a loopback name, which stops DNS rebinding (a foreign name that resolves to 127.0.0.1);
* an `Origin` or `Sec-Fetch-Site` of another site is refused, whatever the method;
* a body must be declared as JSON, so a form post from a web page is refused before it is read.

The dashboard's files and `/livez` contain nothing secret and need no token.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.errors import Forbidden, GatewayError, Unauthorized, UnsupportedMediaType
from gateway.request.operator_tokens import Tokens

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# RFC 9110, 7.2: nothing may stand beside host and port. A browser can be led to a name that begins like ours.
_AUTHORITY = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]{2,45})\]|(?P<name>[A-Za-z0-9._-]{1,253}))(?::(?P<port>[0-9]{1,5}))?"
)
_MAX_PORT = 65_535
_SAFE_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class Guard:
    """Decides whether a request is allowed."""

    def __init__(self, tokens: Tokens, *, allowed_hosts: tuple[str, ...] = ()) -> None:
        self._tokens = tokens
        self._hosts = frozenset(("localhost", *(host.lower() for host in allowed_hosts)))

    def check(self, request: web.Request, *, is_change: bool) -> None:
        """Raise Unauthorized, Forbidden or UnsupportedMediaType."""
        if self._tokens.is_any:
            self._check_token(request.headers.get("authorization", ""), is_change=is_change)
        else:
            self._check_loopback(request)
        if request.can_read_body and request.content_type != "application/json":
            raise UnsupportedMediaType("the body must be JSON: send content-type: application/json")

    def _check_token(self, authorization: str, *, is_change: bool) -> None:
        role = self._tokens.role_of(authorization)
        if role is None:
            raise Unauthorized("the admin API needs a token: send Authorization: Bearer TOKEN")
        if is_change and role != "operate":
            raise Forbidden("this token is read-only: use the operator's token to make changes")

    def _check_loopback(self, request: web.Request) -> None:
        if not _is_loopback(request.remote):
            raise Forbidden(
                "no admin token is set, so the admin API accepts loopback clients only: set a token"
            )
        host = request.headers.get("host", "")
        name = _host_name(host)
        if name not in self._hosts and not _is_loopback(name):
            raise Forbidden(
                "no admin token is set, so the Host header must be localhost or a loopback address: "
                "set a token, or add this host to admin.allowed_hosts"
            )
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            raise Forbidden("pages of another origin may not use the admin API")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Forbidden("pages of another site may not use the admin API")


def _host_name(host: str) -> str | None:
    """`[::1]:8001` → `::1`; `LocalHost:8001` → `localhost`; None for what is no host with a port."""
    authority = _AUTHORITY.fullmatch(host)
    if authority is None or int(authority["port"] or 0) > _MAX_PORT:
        return None
    return (authority["v6"] or authority["name"]).lower()


def _is_loopback(remote: str | None) -> bool:
    try:
        return remote is not None and ipaddress.ip_address(remote).is_loopback
    except ValueError:
        return False


def make_problem_middleware() -> Middleware:
    """Turn every error into problem details, including aiohttp's 404 and 405 and unexpected exceptions."""

    @web.middleware
    async def render_problems(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except GatewayError as error:
            headers = {"www-authenticate": "Bearer"} if error.status == 401 else {}
            if error.retry_after_s is not None:
                headers["retry-after"] = str(math.ceil(error.retry_after_s))
            response = problem(error.status, error.code, error.message, headers, param=error.param)
        except web.HTTPException as error:
            headers = {name: error.headers[name] for name in ("Allow", "Location") if name in error.headers}
            code = error.reason.lower().replace(" ", "_")
            response = problem(error.status, code, error.reason, headers)
        except Exception:  # the request boundary: the client must always get problem details
            logging.getLogger(__name__).exception("unexpected error in an admin request")
            response = problem(500, "internal_error", "internal error in the gateway; see its log")
        for name, value in _SAFE_HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return render_problems


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error answer (RFC 9457)."""

    title: str
    status: int
    code: str
    detail: str
    type: str = msgspec.field(default="about:blank")
    param: str | None = None


def problem(
    status: int,
    code: str,
    detail: str,
    headers: Mapping[str, str] | None = None,
    *,
    param: str | None = None,
) -> web.Response:
    body = Problem(title=code.replace("_", " "), status=status, code=code, detail=detail, param=param)
    return web.Response(
        status=status,
        body=msgspec.json.encode(body),
        headers={"content-type": "application/problem+json", **(headers or {})},
    )
