"""The answer to a request that failed before an answer had begun, in the dialect of its API."""

from __future__ import annotations

import logging

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


def log_fault(request_id: str, error: Exception) -> None:
    """A fault of our own: told in full here, and to the client only as an internal error."""
    logging.getLogger(__name__).error("unforeseen error in request %s", request_id, exc_info=error)
