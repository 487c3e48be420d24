"""One admin operation: an HTTP method and path for a plain typed function.

The function's annotations are the contract. They define what is decoded, what is encoded and what
`openapi.py` publishes, so the three cannot differ. A handler takes keyword arguments only:

    names in the path      `str`, optionally with a pattern; a name that does not match gets 404
    `query`                a struct of the query's parameters
    `body`                 a struct, the JSON body; `X | None` if the body is optional
    `if_match`             `IfMatch`, the entity tags sent by the caller

It returns a struct, `Reply[struct]` to choose the status, or None (also in a reply) for 204. If the struct
has a method `etag`, the answer carries that entity tag. Knows nothing about tokens (`access.py`) or about
what the operations do.
"""

from __future__ import annotations

import hashlib
import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web

from gateway.errors import BadRequest, NotFound, PreconditionFailed

T = TypeVar("T")
Handler = Callable[..., Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[T]):
    """An answer with an explicit status."""

    value: T
    status: int


@dataclass(frozen=True, slots=True)
class IfMatch:
    """The `If-Match` header, if the request has one (RFC 9110, section 13.1.1)."""

    header: str | None

    def require(self, etag: str) -> None:
        """Raise PreconditionFailed if the header is present and does not include `etag`."""
        if self.header is None or self.header.strip() == "*":
            return
        if etag not in (tag.strip() for tag in self.header.split(",")):
            raise PreconditionFailed("changed meanwhile; fetch it again and retry")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A handler's annotations, taken apart."""

    path_types: Mapping[str, Any]
    query: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None
    is_body_optional: bool
    uses_if_match: bool
    answer: type[msgspec.Struct] | None


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the API."""

    method: str
    path: str  # below /admin/v1
    handler: Handler
    summary: str
    tag: str = field(kw_only=True)
    asks_only: bool = field(default=False, kw_only=True)  # a POST that changes nothing
    statuses: tuple[int, ...] = field(default=(200,), kw_only=True)
    problems: tuple[int, ...] = field(default=(), kw_only=True)  # besides those that follow from its shape
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _shape_of(self.handler))

    @property
    def is_change(self) -> bool:
        """Whether the operation needs the role `operate`."""
        return self.method != "GET" and not self.asks_only

    @property
    def name(self) -> str:
        return self.handler.__name__

    async def run(self, request: web.Request) -> web.Response:
        """Decode, call, encode. Raises GatewayError."""
        shape = self.shape
        arguments: dict[str, object] = {
            name: _decode_name(request.match_info[name], kind) for name, kind in shape.path_types.items()
        }
        if shape.query is not None:
            arguments["query"] = _decode_query(request, shape.query)
        if shape.body is not None:
            arguments["body"] = await _decode_body(request, shape.body, is_optional=shape.is_body_optional)
        if shape.uses_if_match:
            arguments["if_match"] = IfMatch(request.headers.get("if-match"))
        return _encode(await self.handler(**arguments))


def make_etag(*parts: object) -> str:
    """Return a strong entity tag for the contents of `parts`."""
    return f'"{hashlib.blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()}"'


def _shape_of(handler: Handler) -> Shape:
    hints = typing.get_type_hints(handler, include_extras=True)
    answer = hints.pop("return")
    if typing.get_origin(answer) is Reply:
        (answer,) = typing.get_args(answer)
    answer, _ = _without_none(answer)
    query = hints.get("query")
    body, is_optional = _without_none(hints.get("body"))
    special = ("body", "query", "if_match")
    return Shape(
        path_types={name: kind for name, kind in hints.items() if name not in special},
        query=query,
        body=body,
        is_body_optional=is_optional,
        uses_if_match="if_match" in hints,
        answer=None if answer is types.NoneType else answer,
    )


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return X and whether the hint is `X | None`."""
    if typing.get_origin(hint) is not types.UnionType:
        return hint, False
    return next(member for member in typing.get_args(hint) if member is not types.NoneType), True


def _decode_name(text: str, kind: Any) -> str:
    try:
        return str(msgspec.convert(text, type=kind))
    except msgspec.ValidationError as error:
        raise NotFound("invalid name") from error


def _decode_query(request: web.Request, kind: type[msgspec.Struct]) -> msgspec.Struct:
    given: dict[str, str] = {}
    for name, value in request.query.items():
        if name in given:
            raise BadRequest(f"query parameter {name} is given twice", param=name)
        given[name] = value
    try:
        return msgspec.convert(given, type=kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error)) from error


async def _decode_body(
    request: web.Request, kind: type[msgspec.Struct], *, is_optional: bool
) -> msgspec.Struct | None:
    data = await request.read()
    if not data and is_optional:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadRequest(str(error)) from error


def _encode(answer: object) -> web.Response:
    reply = answer if isinstance(answer, Reply) else Reply(value=answer, status=200)
    answer, status = reply.value, reply.status
    if answer is None:
        return web.Response(status=204)
    headers = {"content-type": "application/json"}
    etag: Any = getattr(answer, "etag", None)
    if etag is not None:
        headers["etag"] = etag()
    return web.Response(status=status, body=msgspec.json.encode(answer), headers=headers)
