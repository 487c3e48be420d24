"""The errors that the gateway raises. Each has an HTTP status, a source, and whether to try another backend.

`wire.error_bodies` turns an error into the JSON of the caller's API dialect. `source` is a metrics label and
the header `x-homing-error-source`: `downstream` (caused by the client), `upstream` (by a backend), `internal`
(the gateway refused or failed). `is_retryable` means that *another* backend may be tried, never the same one
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final, Literal

ErrorSource = Literal["downstream", "upstream", "internal"]

_MAX_SHOWN_LENGTH: Final = 100


def shown(text: str) -> str:
    """Return a client's text as it may stand in a message or a log: at most 100 characters of it, those that
    do not print escaped."""
    start = text[:_MAX_SHOWN_LENGTH]
    if not start.isprintable():
        start = start.encode("unicode_escape").decode("ascii")
    return start if len(text) <= _MAX_SHOWN_LENGTH else f"{start}…"


class GatewayError(Exception):
    """Base of all errors that may become an HTTP answer."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    error_type: ClassVar[str] = "api_error"  # OpenAI's `error.type`
    source: ClassVar[ErrorSource] = "internal"
    is_retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def forget_origin(self) -> None:
        """Drop traceback and cause: they lead to frames that know who keeps this error, which is a cycle."""
        self.__traceback__ = self.__cause__ = self.__context__ = None


class BadRequest(GatewayError):
    """The request is invalid; `param` names the field."""

    status = 400
    code = "invalid_request"
    error_type = "invalid_request_error"
    source = "downstream"


class Unauthorized(GatewayError):
    status = 401
    code = "invalid_api_key"
    error_type = "authentication_error"
    source = "downstream"


class CannotAuthenticate(GatewayError):
    """Credentials cannot be checked now, because their store or provider is unavailable.

    They may be valid.
    """

    status = 503
    code = "authentication_unavailable"
    error_type = "overloaded_error"


class Forbidden(GatewayError):
    status = 403
    code = "permission_denied"
    error_type = "permission_error"
    source = "downstream"


class NotFound(GatewayError):
    status = 404
    code = "not_found"
    error_type = "invalid_request_error"
    source = "downstream"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(GatewayError):
    status = 405
    code = "method_not_allowed"
    error_type = "invalid_request_error"
    source = "downstream"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class UpgradeRequired(GatewayError):
    """A WebSocket handshake on a path that takes none. Clients that read 426 go on with plain requests."""

    status = 426
    code = "upgrade_required"
    error_type = "invalid_request_error"
    source = "downstream"


class RequestTimeout(GatewayError):
    """The client stopped sending in the middle of its request body."""

    status = 408
    code = "request_timeout"
    error_type = "invalid_request_error"
    source = "downstream"


class Conflict(GatewayError):
    """The request is valid but conflicts with the current state."""

    status = 409
    code = "conflict"
    error_type = "invalid_request_error"
    source = "downstream"


class PreconditionFailed(GatewayError):
    """The caller's `If-Match` does not match the current state."""

    status = 412
    code = "precondition_failed"
    error_type = "invalid_request_error"
    source = "downstream"


class BodyTooLarge(GatewayError):
    status = 413
    code = "request_too_large"
    error_type = "invalid_request_error"
    source = "downstream"


class UnsupportedMediaType(GatewayError):
    status = 415
    code = "unsupported_media_type"
    error_type = "invalid_request_error"
    source = "downstream"


class ExpectationFailed(GatewayError):
    """The request expects something other than `100-continue`."""

    status = 417
    code = "expectation_failed"
    error_type = "invalid_request_error"
    source = "downstream"


class TooManyRequests(GatewayError):
    status = 429
    code = "rate_limit_exceeded"
    error_type = "rate_limit_error"
    source = "downstream"

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.headers = headers  # `x-ratelimit-*`


class ShuttingDown(GatewayError):
    """This gateway is shutting down."""

    status = 503
    code = "shutting_down"
    error_type = "overloaded_error"


class NoBackend(GatewayError):
    """No backend can take this request now."""

    status = 503
    code = "no_backend_available"
    error_type = "overloaded_error"
    source: ClassVar[ErrorSource] = "upstream"


class Overloaded(NoBackend):
    """The gateway refused the request: its limits and queue are full, or it lacks resources."""

    code = "overloaded"
    source = "internal"


class UpstreamError(GatewayError):
    """A backend failed this request. The subclass tells the phase, which decides whether to retry."""

    status = 502
    code = "upstream_error"
    source = "upstream"
    is_retryable = True


class UpstreamConnectFailed(UpstreamError):
    """Nothing was sent, so it is always safe to try another backend."""

    code = "upstream_connect_failed"


class UpstreamRefused(UpstreamConnectFailed):
    """Nobody listens at the backend's address: the connection was refused, or there is no socket file."""

    code = "upstream_refused"


class UpstreamPoolFull(UpstreamConnectFailed):
    """The gateway's own limit of connections to this backend is reached: it says nothing of the backend."""

    code = "upstream_pool_full"


class UpstreamReset(UpstreamError):
    """The connection ended before the response head was complete.

    `is_stale`: it had served a request before, and ended without a single byte of an answer to this one. The
    backend may have closed it as idle in the moment in which it was used again.
    `was_reset`: the end was a reset, which an idle connection that is closed in good order does not send.
    """

    code = "upstream_reset"

    def __init__(self, message: str, *, is_stale: bool = False, was_reset: bool = False) -> None:
        super().__init__(message)
        self.is_stale, self.was_reset = is_stale, was_reset


class UpstreamUnavailable(UpstreamError):
    """The backend answered that it cannot serve now (502, 503, 504; 429 if configured)."""

    status = 503
    code = "upstream_unavailable"


class UpstreamFailed(UpstreamUnavailable):
    """The backend said in the body of a good answer that it has failed, before any content."""

    status = 502
    code = "upstream_failed"


class UpstreamProtocolError(UpstreamError):
    """The backend's answer is not valid HTTP/1.1 or has conflicting framing."""

    code = "upstream_protocol_error"


class UpstreamTimeout(UpstreamError):
    """The backend sent no response head, or no byte of the body, within the limit."""

    status = 504
    code = "upstream_timeout"


class UpstreamTruncated(UpstreamError):
    """The response body ended early. Another backend may be tried while the client has nothing of it."""

    code = "upstream_truncated"
