"""The answer to a request that failed before an answer had begun, in the dialect of its API."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.downstream.request import ClientRequest
from gateway.errors import GatewayError
from gateway.values import Api
from gateway.wire.error_bodies import error_response


def refuse(
    request: ClientRequest,
    api: Api,
    error: GatewayError,
    request_id: str,
    cors_headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Write the whole answer."""
    status, body, headers = error_response(api, error)
    lines = [(name.encode(), value.encode()) for name, value in headers]
    lines.append((b"x-request-id", request_id.encode()))
    request.answer(status, [*lines, *cors_headers], body)
