"""The credentials of a request: every secret that it brings, in whatever place an SDK puts one.

Clients send more than they mean to: an agent adds the login of its vendor, a proxy a password of its own. So
no place decides alone: whoever reads this tries all, and a secret that proves nothing is no mistake.

Invariant: no error message quotes what was sent. Everything stays bytes: a secret need not be text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.wire.header_names import HeaderNames
from gateway.wire.headers import CREDENTIALS

MAX_LENGTH: Final = 16 * 1024
MAX_TRIED: Final = 4
"""Each unknown one may cost a look-up in Redis."""

RawHeader = tuple[bytes, bytes]

_NONE: Final = 0
_WITH_SCHEME: Final = 1
_BARE: Final = 2


def _kind_of(name: bytes) -> int:
    if name not in CREDENTIALS:
        return _NONE
    return _WITH_SCHEME if name == b"authorization" else _BARE


_KINDS: Final = HeaderNames(_kind_of)


def credentials_of(raw_headers: Sequence[RawHeader]) -> list[tuple[bytes, RawHeader]]:
    """Return each secret with the header that it came in, in order of arrival; at most `MAX_TRIED`.

    Empty ones and those longer than `MAX_LENGTH` are none. One pass, O(headers).
    """
    found: list[tuple[bytes, RawHeader]] = []
    for header in raw_headers:
        kind = _KINDS[header[0]]
        if kind != _NONE:
            secret = header[1]
            if kind == _WITH_SCHEME:
                scheme, _, rest = secret.partition(b" ")
                secret = (rest or scheme).strip()  # a lone word is a key without a scheme
            if 0 < len(secret) <= MAX_LENGTH:
                found.append((secret, header))
    return found[:MAX_TRIED]


def common_name_of(certificate: object) -> str | None:
    """Return the common name of a peer certificate, as Python's ssl represents it. The last one counts."""
    found = None
    subject = certificate.get("subject", ()) if isinstance(certificate, dict) else ()
    for relative_name in subject:
        for field, value in relative_name:
            if field == "commonName":
                found = value
    return found
