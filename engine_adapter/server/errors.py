"""Errors in the form that OpenAI's clients expect.

Decides status, type and code of each refusal. Handlers raise `ApiError` on purpose; any other exception is a
bug and becomes a 500 without details. The path decides in which dialect the error is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

ANTHROPIC_TYPES = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """A response other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.error_type = error_type
        self.param = param
        self.headers = dict(headers or {})

    def body(self, path: str) -> bytes:
        """The error object in the dialect of the path: OpenAI's, or Anthropic's for its Messages API."""
        if path.startswith("/v1/messages"):
            kind = ANTHROPIC_TYPES.get(
                self.status, "invalid_request_error" if self.status < 500 else "api_error"
            )
            return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message}})
        error = {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """The request is invalid; `param` names the field."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, what: str) -> ApiError:
    """A known parameter that would change the answer and that this worker does not support."""
    message = f"{param}: {what} is not supported by this worker"
    return ApiError(400, message, code="unsupported_parameter", param=param)


def model_not_found(model: str, served: str) -> ApiError:
    shown = model if len(model) <= 100 else model[:100] + "…"
    message = f"the model {shown!r} does not exist here; this worker serves {served!r}"
    return ApiError(404, message, code="model_not_found", param="model")


def not_found(message: str, *, param: str | None = None) -> ApiError:
    return ApiError(404, message, code="not_found", param=param)


def overloaded(message: str, *, code: str = "overloaded", retry_after_s: float = 1.0) -> ApiError:
    """This worker cannot take the request now, but another may; `code` says why."""
    headers = {"Retry-After": str(math.ceil(retry_after_s))}
    return ApiError(503, message, code=code, error_type="overloaded_error", headers=headers)


def internal_error(message: str = "the worker failed on this request") -> ApiError:
    return ApiError(500, message, code="internal_error", error_type="api_error")
