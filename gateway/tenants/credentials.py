"""What a client shows to prove who it is: one secret, in one of the headers that SDKs use.

Invariant: no message here quotes what was sent.
"""

from __future__ import annotations

from typing import Protocol

from gateway.errors import Unauthorized

MAX_LENGTH = 16 * 1024


class Headers(Protocol):
    """What is asked of a request's headers; names in any case."""

    def getall(self, name: str, default: list[str]) -> list[str]: ...


def credential_of(headers: Headers) -> str | None:
    """Return the API key or token of a request, None when there is none. Raises Unauthorized.

    `Authorization: Bearer …` as OpenAI's SDKs send, else `x-api-key` as Anthropic's do.
    """
    values = headers.getall("authorization", [])
    if not values:
        keys = headers.getall("x-api-key", [])
        if len(keys) > 1:
            raise Unauthorized("The request has several x-api-key headers; send one.")
        return _checked(keys[0].strip()) if keys else None
    if len(values) > 1:
        raise Unauthorized("The request has several Authorization headers; send one.")
    scheme, _, credential = values[0].strip().partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthorized("The Authorization header must be `Bearer` and an API key.")
    return _checked(credential.strip())


def _checked(credential: str) -> str:
    if not credential or len(credential) > MAX_LENGTH:
        raise Unauthorized("The API key is empty or too long.")
    return credential


def common_name_of(certificate: object) -> str | None:
    """Return the common name in a peer certificate, as Python's ssl describes it. The last one counts."""
    found = None
    subject = certificate.get("subject", ()) if isinstance(certificate, dict) else ()
    for relative_name in subject:
        for field, value in relative_name:
            if field == "commonName":
                found = value
    return found
