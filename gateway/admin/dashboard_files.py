"""Serves the dashboard's files, with headers that forbid everything the page does not need.

The page itself holds no data, so it needs no token; it fetches its data from the API, which does. The content
policy allows scripts, styles and requests of this origin only and nothing inline, requires trusted types (no
string becomes markup or code), and forbids framing. A hostile name can therefore not act on behalf of an
operator.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

_DIRECTORY = Path(__file__).parent / "dashboard"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",  # revalidated each time, sent again only if changed
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    body: bytes
    etag: str
    content_type: str


class DashboardFiles:
    """Serves `/admin/` and `/admin/dashboard/…` from memory, and nothing else."""

    def __init__(self) -> None:
        self._files = {
            path.relative_to(_DIRECTORY).as_posix(): _read(path)
            for path in sorted(_DIRECTORY.rglob("*"))
            if path.suffix in _TYPES
        }

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/", self._to_page)
        app.router.add_get("/admin", self._to_page)
        app.router.add_get("/admin/", self._page)
        app.router.add_get("/admin/dashboard/{path:.+}", self._file)

    async def _to_page(self, request: web.Request) -> web.Response:
        return web.Response(status=308, headers={"location": "/admin/"})

    async def _page(self, request: web.Request) -> web.Response:
        return _send(request, self._files["index.html"])

    async def _file(self, request: web.Request) -> web.Response:
        found = self._files.get(request.match_info["path"])
        if found is None:
            raise web.HTTPNotFound
        return _send(request, found)


def _read(path: Path) -> _File:
    body = path.read_bytes()
    etag = f'"{hashlib.blake2b(body, digest_size=8).hexdigest()}"'
    return _File(body=body, etag=etag, content_type=_TYPES[path.suffix])


def _send(request: web.Request, file: _File) -> web.Response:
    headers = {**_HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.body, headers={**headers, "content-type": file.content_type})
