"""The request paths that are served, with their API dialect and methods.

Only the path of a target counts. The host of an absolute-form target is ignored, so a client cannot steer a
request with it. Invariant: a served path contains no dot segment, escape or empty segment, and the backend
sees the path that was matched here. Knows nothing about bodies or backends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from gateway.errors import BadRequest, MethodNotAllowed, NotFound
from gateway.values import Api
from gateway.wire.objects import KINDS, Place, is_reserved, place_of

_POST: Final = ("POST",)
_GET: Final = ("GET", "HEAD")
_ANY_METHOD: Final = (*_GET, "POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One parsed request target."""

    api: Api
    path: str  # as sent to a backend: one slash between segments, none at the end
    query: str = ""  # as received, without the question mark
    methods: tuple[str, ...] = _POST
    is_session_routed: bool = True  # False: answered over the whole fleet (the list of models)
    is_count: bool = False  # only counts or splits into tokens: computes none
    place: Place | None = None  # of an object that engines keep, or of a list of them

    @property
    def target(self) -> str:
        """Path and query for the request line to a backend."""
        return f"{self.path}?{self.query}" if self.query else self.path


_OPERATIONS: Final[dict[Api, tuple[str, ...]]] = {
    Api.CHAT: ("/v1/chat/completions",),
    Api.COMPLETIONS: ("/v1/completions",),
    Api.RESPONSES: ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"),
    Api.MESSAGES: ("/v1/messages", "/v1/messages/count_tokens"),
    Api.EMBEDDINGS: ("/v1/embeddings", "/v1/classify", "/classify", "/v1/pooling", "/pooling"),
    Api.RERANK: ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
    Api.TOKENIZE: ("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
    Api.GENERATE: ("/generate",),
    Api.AUDIO: ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"),
}

COUNT_PATHS: Final = frozenset(
    {"/v1/messages/count_tokens", "/v1/responses/input_tokens", *_OPERATIONS[Api.TOKENIZE]}
)
"""What clients ask about a prompt without having it computed."""

_MODEL_PATH: Final = re.compile(r"/v1/models/[A-Za-z0-9._:@+-]+(?:/[A-Za-z0-9._:@+-]+)*")
_SEGMENTS: Final = re.compile(r"[A-Za-z0-9._~:@+=,-]+(?:/[A-Za-z0-9._~:@+=,-]+)*")
_MESSAGES_TARGET: Final = re.compile(r"(?:[a-z]+://[^/]*)?/+v1/+messages(?:[/?]|\Z)")
_REPEATED_SLASHES: Final = re.compile(r"/{2,}")
_ABSOLUTE_FORM: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")


class RouteTable:
    """All served paths: the known APIs and the configured pass-through paths."""

    def __init__(self, passthrough_paths: Iterable[str] = ()) -> None:
        table = {
            path: Route(api=api, path=path, is_count=path in COUNT_PATHS)
            for api, paths in _OPERATIONS.items()
            for path in paths
        }
        table["/v1/models"] = Route(api=Api.MODELS, path="/v1/models", methods=_GET, is_session_routed=False)
        for kind in KINDS:
            table[kind.path] = Route(
                api=kind.api, path=kind.path, methods=kind.methods, place=place_of(kind.path)
            )
        table["/v1/realtime"] = Route(api=Api.REALTIME, path="/v1/realtime", methods=("GET",))
        paths = [path for path in passthrough_paths if not path.endswith("/*")]
        for path in map(normalise_path, paths):
            table.setdefault(path, Route(api=Api.OTHER, path=path, methods=_ANY_METHOD))
        self._table = table
        self._open_prefixes = tuple(path[:-1] for path in passthrough_paths if path.endswith("/*"))

    def match(self, method: str, target: str) -> Route:
        """Return the route of a request line.

        Raises BadRequest for a target with dot segments or forbidden characters, NotFound for an unknown
        path, MethodNotAllowed for a known path with another method (methods are case-sensitive: RFC 9110,
        9.1).
        """
        route = self._table.get(target) or self._find(target)
        if method not in route.methods:
            methods = ", ".join(route.methods)
            allow = f"{methods}, OPTIONS"  # OPTIONS is served through `lookup`
            raise MethodNotAllowed(f"{route.path} does not allow this method: use {methods}", allow=allow)
        return route

    def lookup(self, target: str) -> Route:
        """Return the route of a target whatever the method, for OPTIONS and CORS answers."""
        return self._table.get(target) or self._find(target)

    def _find(self, target: str) -> Route:
        raw_path, query = split_target(target)
        path = normalise_path(raw_path)
        known = self._table.get(path) or _parametrised(path)
        if known is None and not is_reserved(path):
            known = self._passed_through(path)
        if known is None:
            raise NotFound("this gateway does not serve this path")
        return Route(
            api=known.api,
            path=known.path,
            query=query,
            methods=known.methods,
            is_session_routed=known.is_session_routed,
            is_count=known.is_count,
            place=known.place,
        )

    def _passed_through(self, path: str) -> Route | None:
        for prefix in self._open_prefixes:
            if path.startswith(prefix) and _SEGMENTS.fullmatch(path, len(prefix)):
                return Route(api=Api.OTHER, path=path, methods=_ANY_METHOD)
        return None


def check_passthrough(path: str) -> None:
    """Raise ValueError if `path` is not allowed on the pass-through list."""
    segments = path.removeprefix("/").removesuffix("/*")
    is_plain = path.startswith("/") and _SEGMENTS.fullmatch(segments)
    if not is_plain or any(segment in (".", "..") for segment in segments.split("/")):
        raise ValueError(f"passthrough_paths: {path!r} is not a path such as /v1/images or /v1/images/*")


def split_target(target: str) -> tuple[str, str]:
    """Split a request target into path and query, dropping scheme, host and fragment."""
    if not target.startswith("/"):
        absolute = _ABSOLUTE_FORM.match(target)
        if absolute is None:
            raise BadRequest("the request target must be a path", param="path")
        target = target[absolute.end() :] or "/"
        if target.startswith("?"):
            target = "/" + target
    path, _, query = target.partition("#")[0].partition("?")
    return path, query


def normalise_path(path: str) -> str:
    """Collapse repeated and trailing slashes. Refuse paths that another server could read differently."""
    decoded = unquote(unquote(path))
    if "\\" in decoded or any(ord(character) < 0x21 or ord(character) == 0x7F for character in decoded):
        raise BadRequest("the path contains a forbidden character", param="path")
    if any(segment in (".", "..") for segment in decoded.split("/")):
        raise BadRequest("the path contains a dot segment (. or ..)", param="path")
    collapsed = _REPEATED_SLASHES.sub("/", path)
    return collapsed.rstrip("/") or "/"


def dialect_of(target: str) -> Api:
    """Return the dialect whose error format a client expects for `target`, served or not."""
    return Api.MESSAGES if _MESSAGES_TARGET.match(target) else Api.OTHER


def _parametrised(path: str) -> Route | None:
    place = place_of(path)
    if place is not None:
        return Route(api=place.kind.api, path=path, methods=place.methods, place=place)
    if _MODEL_PATH.fullmatch(path):
        return Route(api=Api.MODELS, path=path, methods=_GET, is_session_routed=False)
    return None
