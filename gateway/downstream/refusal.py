"""The answer to a request that never became one: unparsable, oversized, or failed inside the server.

Decision: always JSON in OpenAI's error shape (no API dialect is known yet), HTTP/1.1, `connection: close`.
Echoes no byte of the request. Knows nothing of handlers and of sockets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus

from gateway.errors import ErrorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a client is told, and what is counted."""

    status: int
    code: str
    message: str

    @property
    def source(self) -> ErrorSource:
        return "downstream" if self.status < 500 or self.status == 505 else "internal"

    def encode(self) -> bytes:
        """The whole answer; nothing may follow it on its connection."""
        error_type = "invalid_request_error" if self.source == "downstream" else "api_error"
        error = {"message": self.message, "type": error_type, "param": None, "code": self.code}
        body = json.dumps({"error": error}).encode()
        retry = "retry-after: 1\r\n" if self.status == 503 else ""
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\ncontent-type: application/json\r\n"
            f"x-homing-error-source: {self.source}\r\n"
            f"{retry}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


class Refused(Exception):
    """Raised where a request turns out to be none."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


TOO_MANY_CONNECTIONS = Refusal(
    status=503, code="overloaded", message="the gateway has no room for another connection"
)
NOT_HTTP = Refusal(status=400, code="invalid_request", message="this is not an HTTP/1.1 request")
OTHER_VERSION = Refusal(
    status=505, code="http_version_not_supported", message="this server speaks HTTP/1.1 and HTTP/1.0"
)
MALFORMED = Refusal(status=400, code="invalid_request", message="the request is not valid HTTP/1.1")
TOO_MANY_FIELDS = Refusal(
    status=431, code="headers_too_large", message="the request has too many header fields"
)
FAILED = Refusal(status=500, code="internal_error", message="the gateway failed to handle the request")


def line_too_long(limit_bytes: int) -> Refusal:
    return _too_large(f"the request line or a header field is longer than {limit_bytes} bytes")


def head_too_large(limit_bytes: int) -> Refusal:
    return _too_large(f"the request line and the header fields together exceed {limit_bytes} bytes")


def head_timeout(limit_s: float) -> Refusal:
    return Refusal(
        status=408,
        code="request_timeout",
        message=f"the request line and the header fields did not arrive within {limit_s:g} s",
    )


def _too_large(message: str) -> Refusal:
    return Refusal(status=431, code="headers_too_large", message=message)
