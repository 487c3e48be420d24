"""Decodes a request body into a typed value, or raises a 400 that names the field.

Decides what is accepted as JSON. msgspec decodes straight into the type. What it refuses as not JSON is
parsed again with the standard library, for one reason: JavaScript clients cut emoji in half and send unpaired
surrogates, which are valid JSON escapes but not text. A 4xx would make such a conversation fail for ever, so
they become U+FFFD. Whatever a client sends, only `ApiError` is raised.
"""

from __future__ import annotations

import json
import re
from typing import TypeVar

import msgspec
from aiohttp import web

from engine_adapter.engine.text.tokenizer import well_formed
from engine_adapter.server.errors import ApiError, bad_request

Body = TypeVar("Body")

_WHERE = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")


async def read_body(request: web.Request, type_: type[Body]) -> Body:
    """Read and decode the body.

    Raises:
        ApiError: 400 (not JSON, wrong types), 413 (larger than the server accepts), 415 (not JSON by header).
    """
    if request.headers.get("Content-Type") and "json" not in request.content_type:
        raise ApiError(
            415,
            f"Content-Type {request.content_type!r} is not supported, send application/json",
            code="unsupported_media_type",
        )
    try:
        raw = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        limit = request.app._client_max_size
        raise ApiError(413, f"the body exceeds {limit} bytes", code="request_too_large") from error
    return decode(raw, type_)


def decode(raw: bytes, type_: type[Body]) -> Body:
    """Decode JSON bytes into `type_`."""
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return msgspec.json.decode(raw, type=type_)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except RecursionError as error:
        raise bad_request("the JSON is nested too deeply", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_leniently(raw, type_)


def _decode_leniently(raw: bytes, type_: type[Body]) -> Body:
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
        return msgspec.convert(_repair(value), type_)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    except RecursionError as error:
        raise bad_request("the JSON is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        what = "the body is empty" if not raw.strip() else f"the body is not valid JSON: {error}"
        raise bad_request(what, code="invalid_json") from error


def _repair(value: object) -> object:
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, list):
        return [_repair(item) for item in value]
    if isinstance(value, dict):
        return {well_formed(key): _repair(item) for key, item in value.items()}
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _invalid(error: msgspec.ValidationError) -> ApiError:
    """Turn "Expected `str`, got `int` - at `$.messages[0].role`" into a message and a param."""
    text = str(error)
    missing = re.match(r"Object missing required field `(?P<name>[^`]+)`", text)
    where = _WHERE.search(text)
    path = where["path"] if where else ""
    if missing:
        path = f"{path}.{missing['name']}" if path else missing["name"]
        return bad_request(f"{path} is required", param=path, code="missing_required_parameter")
    reason = text[: where.start()] if where else text
    message = f"{path}: {reason}" if path else reason
    return bad_request(message, param=path or None, code="invalid_type")
