"""Which web pages may call the gateway from a browser, and what they are told (the Fetch standard, CORS).

Decision: off unless origins are listed. Then the gateway alone speaks of it: preflights end here, and a
backend's own `access-control-*` fields are replaced, since two answers to one question count as none.
Headers that a page asks to send are granted by name: the wildcard would leave out `Authorization`.

Invariant: an origin that is not listed gets no permission in any answer. Knows no routes and no sockets.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

EXPOSED_HEADERS: Final = (
    "x-request-id",
    "x-homing-backend",
    "x-homing-affinity",
    "x-homing-key-source",
    "x-homing-reason",
    "x-homing-error-source",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    *(
        f"x-ratelimit-{what}-{unit}"
        for what in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)
"""Fields of our answers that a page may read; browsers hide all but a few others."""

_FIELD_NAMES: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#*]+")
_MAX_ASKED_BYTES: Final = 4_096

HeaderLines = tuple[tuple[str, str], ...]


class CorsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which web pages may call the gateway."""

    allow_origins: tuple[str, ...]
    """Origins of the pages, such as `https://chat.example.org`; `"*"` alone allows every page."""
    allow_headers: tuple[str, ...] = ("*",)
    """Request headers that pages may send; `"*"` alone allows all headers that they request."""
    allow_credentials: bool = False
    """Whether pages may send cookies. Needs origins listed by name. Not needed for `Authorization`."""
    max_age_s: int = 600
    """How long a browser may cache the answer to a preflight."""

    def __post_init__(self) -> None:
        for origin in self.allow_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allow_origins: {origin!r} is not an origin such as https://chat.example.org"
                )
        for name in self.allow_headers:
            if not _FIELD_NAMES.fullmatch(name) or "," in name:
                raise ValueError(f"allow_headers: {name!r} is not a header name")
        if not self.allow_origins:
            raise ValueError("allow_origins must name an origin; leave `cors` out to switch it off")
        for option in ("allow_origins", "allow_headers"):
            values = getattr(self, option)
            if "*" in values and len(values) > 1:
                raise ValueError(f'{option}: "*" must stand alone')
        if self.allow_credentials and "*" in self.allow_origins:
            raise ValueError("allow_credentials needs allow_origins listed by name, not *")
        if self.max_age_s < 0:
            raise ValueError("max_age_s must not be negative")


class Cors:
    """Answers browsers under one set of options."""

    def __init__(self, settings: CorsSettings) -> None:
        self._settings = settings
        self._allows_all = "*" in settings.allow_origins
        self._origins = frozenset(settings.allow_origins)
        self._credentials: HeaderLines = (
            (("access-control-allow-credentials", "true"),) if settings.allow_credentials else ()
        )

    def permits(self, origin: str) -> bool:
        """Whether pages of this origin may call the gateway."""
        return self._allows_all or origin in self._origins

    def answer_headers(self, origin: str | None) -> HeaderLines:
        """What every answer and error carries. Lists of origins make the answer depend on who asks."""
        exposed = (("access-control-expose-headers", ", ".join(EXPOSED_HEADERS)),)
        return self._permission(origin, exposed)

    def preflight_headers(
        self, origin: str | None, asked_headers: str | None, methods: tuple[str, ...]
    ) -> HeaderLines:
        """What the answer to a preflight carries, for a path that takes `methods`."""
        grant: list[tuple[str, str]] = [
            ("access-control-allow-methods", ", ".join(methods)),
            ("access-control-max-age", str(self._settings.max_age_s)),
        ]
        headers = self._granted_headers(asked_headers)
        if headers:
            grant.append(("access-control-allow-headers", headers))
        return self._permission(origin, tuple(grant))

    def _permission(self, origin: str | None, details: HeaderLines) -> HeaderLines:
        if self._allows_all:
            return (("access-control-allow-origin", "*"), *details)
        vary = ("vary", "Origin")
        if origin is None or not self.permits(origin):
            return (vary,)
        return (("access-control-allow-origin", origin), *self._credentials, vary, *details)

    def _granted_headers(self, asked: str | None) -> str:
        if "*" not in self._settings.allow_headers:
            return ", ".join(self._settings.allow_headers)
        if asked is None or len(asked) > _MAX_ASKED_BYTES or not _FIELD_NAMES.fullmatch(asked):
            return ""
        return asked
