"""Formats errors in the dialect of the API that the client called.

All APIs use OpenAI's format except Anthropic Messages. Also tells SDKs whether to retry: `retry-after` if
waiting helps, and `x-should-retry: false` if the official SDKs would repeat a request that cannot succeed (by
default they retry 408, 409, 429 and every 5xx). In a stream that has begun, the error is the last event; the
gateway never adds a `[DONE]` or a finish reason that the engine did not send. Knows nothing about sockets.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from gateway.errors import (
    GatewayError,
    MethodNotAllowed,
    NoBackend,
    TooManyRequests,
    Unauthorized,
    UpgradeRequired,
    UpstreamTimeout,
)
from gateway.values import Api

_DEFAULT_RETRY_AFTER_S: Final = 1.0
_LONGEST_RETRY_WAIT_S: Final = 120.0  # above it OpenAI's SDK uses its own back-off, of at most 8 s

# Anthropic's error types by status: https://docs.anthropic.com/en/api/errors
_ANTHROPIC: Final = (Api.MESSAGES, Api.MESSAGE_BATCHES)
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    426: "invalid_request_error",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_response(api: Api, error: GatewayError) -> tuple[int, bytes, list[tuple[str, str]]]:
    """Return status, JSON body and headers (with content type, without length)."""
    headers = [("content-type", "application/json"), ("x-homing-error-source", error.source)]
    if isinstance(error, MethodNotAllowed):
        headers.append(("allow", error.allow))
    if isinstance(error, UpgradeRequired):
        headers.append(("upgrade", "HTTP/1.1"))  # required by RFC 9110, 15.5.22
    if isinstance(error, Unauthorized):
        headers.append(("www-authenticate", "Bearer"))  # required by RFC 9110, 11.6.1
    if isinstance(error, TooManyRequests):
        headers += error.headers
    retry_after_s = error.retry_after_s
    if retry_after_s is None and isinstance(error, (NoBackend, TooManyRequests)):
        retry_after_s = _DEFAULT_RETRY_AFTER_S
    if retry_after_s is not None and math.isfinite(retry_after_s):
        # RFC 9110 allows whole seconds only; the SDKs also read the milliseconds.
        headers.append(("retry-after", str(max(1, math.ceil(retry_after_s)))))
        headers.append(("retry-after-ms", str(max(1, math.ceil(retry_after_s * 1000)))))
    if not _may_retry(error):
        headers.append(("x-should-retry", "false"))
    return error.status, msgspec.json.encode(_body(api, error)), headers


def stream_error(api: Api, error: GatewayError, *, mid_event: bool) -> bytes:
    """Return the last event of a stream that failed after it had begun.

    `mid_event` means that the backend stopped inside an event. Then a blank line first ends that event, so
    that clients handle it as a broken event and do not join ours to it.
    """
    opening = b"\n\n" if mid_event else b""
    if api is Api.MESSAGES:
        return opening + b"event: error\ndata: " + msgspec.json.encode(_body(api, error)) + b"\n\n"
    if api is Api.RESPONSES:
        event: dict[str, object] = {"type": "error", "code": error.code, "message": _text(error)}
        event |= {"param": error.param, "sequence_number": 0} | _body(
            api, error
        )  # OpenAI's SDKs raise only where `error` is
        return opening + b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
    return opening + b"data: " + msgspec.json.encode(_body(api, error)) + b"\n\n"


def _body(api: Api, error: GatewayError) -> dict[str, object]:
    if api in _ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": _text(error)}}
    details = {"message": _text(error), "type": error.error_type, "param": error.param, "code": error.code}
    return {"error": details}


def _text(error: GatewayError) -> str:
    """Return the message in encodable form: it may quote client text with lone surrogates."""
    return error.message.encode("utf-8", "replace").decode()


def _may_retry(error: GatewayError) -> bool:
    """Whether the same request could succeed if the SDK sends it again.

    After a timeout, a retry would only block another backend for as long. Overload may pass. SDKs ignore a
    long `retry-after` and wait a short time of their own, so a retry would fail again.
    """
    if isinstance(error, UpstreamTimeout):
        return False
    if _LONGEST_RETRY_WAIT_S < (error.retry_after_s or 0.0) < math.inf:
        return False
    return error.status not in (400, 401, 403, 404, 405, 409, 413, 415, 426, 431)
