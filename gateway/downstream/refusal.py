"""The answer to a request that never became one: unparsable, oversized, or failed inside the server.

Decision: always JSON in OpenAI's error shape (no API dialect is known yet), HTTP/1.1, `connection: close`.
Knows nothing of handlers; writes straight to the transport, as the relay does.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import BadHttpMethod, LineTooLong

from gateway.errors import ErrorSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a client is told, and what is counted."""

    status: int
    code: str
    message: str

    @property
    def source(self) -> ErrorSource:
        return "downstream" if self.status < 500 else "internal"

    def encode(self) -> bytes:
        """The whole answer; nothing may follow it on its connection."""
        error_type = "invalid_request_error" if self.status < 500 else "api_error"
        error = {"message": self.message, "type": error_type, "param": None, "code": self.code}
        body = json.dumps({"error": error}).encode()
        retry = "retry-after: 1\r\n" if self.status == 503 else ""
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\ncontent-type: application/json\r\n"
            f"x-homing-error-source: {self.source}\r\n"
            f"{retry}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


TOO_MANY_CONNECTIONS = Refusal(
    status=503, code="overloaded", message="the gateway has no room for another connection"
)


def refusal_for(status: int, exc: BaseException | None) -> Refusal:
    """Translate what aiohttp found wrong. Echoes no byte of the request."""
    if isinstance(exc, LineTooLong):
        limit = exc.args[1] if len(exc.args) > 1 else "the allowed number of"
        return Refusal(
            status=431,
            code="headers_too_large",
            message=f"the request line or a header field is longer than {limit} bytes",
        )
    if exc is not None and "Too many headers" in str(exc):
        return Refusal(status=431, code="headers_too_large", message="the request has too many header fields")
    if isinstance(exc, BadHttpMethod):
        return Refusal(status=400, code="invalid_request", message="this is not an HTTP/1.1 request")
    if status == 504:
        return Refusal(status=504, code="timeout", message="the gateway took too long to handle the request")
    if status >= 500:
        return Refusal(status=500, code="internal_error", message="the gateway failed to handle the request")
    return Refusal(status=status, code="invalid_request", message="the request is not valid HTTP/1.1")


class RefusalResponse(web.StreamResponse):
    """Writes the refusal, then reads nothing more until the client has seen it."""

    def __init__(self, refusal: Refusal, linger_s: float) -> None:
        super().__init__(status=refusal.status)
        self._refusal = refusal
        self._linger_s = linger_s
        self._request: web.BaseRequest | None = None

    @property
    def keep_alive(self) -> bool:
        return False

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        self._request = request
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Cancelled when the client closes, which is what this waits for."""
        transport = self._request.transport if self._request is not None else None
        if transport is None or transport.is_closing():
            return
        transport.write(self._refusal.encode())
        if transport.can_write_eof() and self._linger_s > 0:
            transport.write_eof()
            await asyncio.sleep(self._linger_s)
