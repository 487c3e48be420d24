"""Every error says truly who is behind it."""

from __future__ import annotations

import pytest

from gateway import errors
from gateway.downstream.refusal import TOO_MANY_CONNECTIONS, Refusal
from gateway.errors import GatewayError
from gateway.values import Api
from gateway.wire.error_bodies import error_response

# status, source, whether another backend may be tried
MEANT = {
    "GatewayError": (500, "internal", False),
    "BadRequest": (400, "downstream", False),
    "Unauthorized": (401, "downstream", False),
    "CannotAuthenticate": (503, "internal", False),
    "Forbidden": (403, "downstream", False),
    "NotFound": (404, "downstream", False),
    "ModelNotFound": (404, "downstream", False),
    "MethodNotAllowed": (405, "downstream", False),
    "UpgradeRequired": (426, "downstream", False),
    "RequestTimeout": (408, "downstream", False),
    "Conflict": (409, "downstream", False),
    "PreconditionFailed": (412, "downstream", False),
    "BodyTooLarge": (413, "downstream", False),
    "UnsupportedMediaType": (415, "downstream", False),
    "ExpectationFailed": (417, "downstream", False),
    "TooManyRequests": (429, "downstream", False),
    "ShuttingDown": (503, "internal", False),
    "NoBackend": (503, "upstream", False),
    "Overloaded": (503, "internal", False),  # a limit of the gateway's own; the fleet may be well
    "UpstreamError": (502, "upstream", True),
    "UpstreamConnectFailed": (502, "upstream", True),
    "UpstreamRefused": (502, "upstream", True),
    "UpstreamPoolFull": (502, "upstream", True),
    "UpstreamReset": (502, "upstream", True),
    "UpstreamUnavailable": (503, "upstream", True),
    "UpstreamProtocolError": (502, "upstream", True),
    "UpstreamTimeout": (504, "upstream", True),
    "UpstreamFailed": (502, "upstream", True),
    "UpstreamTruncated": (502, "upstream", True),  # while the client has nothing of the answer
}


def every_error() -> dict[str, type[GatewayError]]:
    found = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, GatewayError)]
    return {one.__name__: one for one in found}


def test_the_table_is_whole() -> None:
    """A new error must be judged here too, and each has a code of its own for who reads metrics."""
    assert every_error().keys() == MEANT.keys()
    codes = [one.code for one in every_error().values()]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("name", MEANT)
def test_an_error_says_who_is_behind_it(name: str) -> None:
    """The class, and the header that a client reads."""
    kind = every_error()[name]
    assert (kind.status, kind.source, kind.is_retryable) == MEANT[name]
    error = errors.MethodNotAllowed("x", allow="POST") if name == "MethodNotAllowed" else kind("x")
    assert dict(error_response(Api.CHAT, error)[2])["x-homing-error-source"] == kind.source


@pytest.mark.parametrize(
    ("refusal", "source"),
    [
        (TOO_MANY_CONNECTIONS, "internal"),
        (Refusal(status=500, code="internal_error", message="x"), "internal"),
        (Refusal(status=431, code="headers_too_large", message="x"), "downstream"),
    ],
)
def test_a_refusal_of_the_server_says_so_too(refusal: Refusal, source: str) -> None:
    """Requests that get no further than the HTTP server: malformed ones are the client's doing."""
    assert refusal.source == source
    assert f"x-homing-error-source: {source}\r\n".encode() in refusal.encode()
