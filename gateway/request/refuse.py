"""The answer to a request that failed before an answer had begun, in the dialect of its API."""

from __future__ import annotations

from gateway.downstream.cors import HeaderLines
from gateway.downstream.request import ClientRequest
from gateway.errors import GatewayError
from gateway.values import Api
from gateway.wire.error_bodies import error_response


def refuse(
    request: ClientRequest, api: Api, error: GatewayError, request_id: str, cors_headers: HeaderLines
) -> None:
    """Write the whole answer."""
    status, body, headers = error_response(api, error)
    request.answer(status, [*headers, ("x-request-id", request_id), *cors_headers], body)
