"""The operators' two bearer tokens, and which role a request gets from the one it sends.

Two roles: `read`, and `operate`, which may also make changes. The admin API checks every request with
them; the data API only checks whether a request may ask for its own debug log.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The token of each role; None if it is not set."""

    operate: str | None = None
    read: str | None = None

    @property
    def is_any(self) -> bool:
        return bool(self.operate or self.read)

    def __repr__(self) -> str:
        return "Tokens(…)"

    def role_of(self, authorization: str) -> str | None:
        """Return `operate`, `read` or None. Always compares both tokens, each in constant time."""
        scheme, _, given = authorization.partition(" ")
        is_bearer = scheme.lower() == "bearer"
        may_operate = _equal(self.operate, given.strip())
        may_read = _equal(self.read, given.strip())
        if not is_bearer:
            return None
        return "operate" if may_operate else "read" if may_read else None


def _equal(token: str | None, given: str) -> bool:
    # compare even when no token is set, so that timing does not reveal which tokens exist
    is_equal = hmac.compare_digest(_bytes_of(given), _bytes_of(token or ""))
    return bool(token) and is_equal


def _bytes_of(text: str) -> bytes:
    """Headers and the environment may hold bytes that are no text."""
    return text.encode("utf-8", "surrogateescape")
