"""The credential of a request: one secret, in one of the headers that SDKs use.

Invariant: no error message quotes what was sent.
"""

from __future__ import annotations

from typing import Protocol

from gateway.errors import Unauthorized

MAX_LENGTH = 16 * 1024


class Headers(Protocol):
    """The part of the headers' interface that is used; names are case-insensitive."""

    def getall(self, name: str, default: list[str]) -> list[str]: ...


def credential_of(headers: Headers) -> str | None:
    """Return the API key or token of a request, None if there is none. Raises Unauthorized.

    `Authorization: Bearer …` as OpenAI's SDKs send it, else `x-api-key` as Anthropic's do.
    """
    values = headers.getall("authorization", [])
    if not values:
        keys = headers.getall("x-api-key", [])
        if len(keys) > 1:
            raise Unauthorized("The request has more than one x-api-key header.")
        return _checked(keys[0].strip()) if keys else None
    if len(values) > 1:
        raise Unauthorized("The request has more than one Authorization header.")
    scheme, _, credential = values[0].strip().partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthorized("The Authorization header must be `Bearer KEY`.")
    return _checked(credential.strip())


def _checked(credential: str) -> str:
    if not credential or len(credential) > MAX_LENGTH:
        raise Unauthorized("The API key is empty or too long.")
    return credential


def common_name_of(certificate: object) -> str | None:
    """Return the common name of a peer certificate, as Python's ssl represents it. The last one counts."""
    found = None
    subject = certificate.get("subject", ()) if isinstance(certificate, dict) else ()
    for relative_name in subject:
        for field, value in relative_name:
            if field == "commonName":
                found = value
    return found
