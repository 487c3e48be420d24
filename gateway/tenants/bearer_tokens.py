"""Bearer tokens (JWT) of an identity provider: which tenant they are for, and until when.

A token must match the configured issuer, audience and signature algorithms (public-key ones, never chosen by
the token), and must expire. Its claim names the tenant; whether that tenant may use this gateway is decided
elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jwt

from gateway.errors import CannotAuthenticate, Unauthorized
from gateway.tenants.provider_keys import ProviderKeys
from gateway.tenants.settings import JwtSettings


class BearerTokens:
    """`gatekeeper.Proof` by tokens. `start` starts fetching the provider's keys."""

    def __init__(
        self,
        settings: JwtSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._wall_clock = settings, wall_clock
        self._keys = ProviderKeys(settings.jwks_url, settings.refresh_s, clock=clock)
        self.start, self.close = self._keys.start, self._keys.close

    def may_know(self, credential: bytes) -> bool:
        """Whether it has three parts and the first is a JSON object in base64."""
        return credential.startswith(b"eyJ") and credential.count(b".") == 2 and credential.isascii()

    async def prove(self, credential: bytes, digest: bytes) -> tuple[str, float] | None:
        token = credential.decode("ascii")
        try:
            header = jwt.get_unverified_header(token)
            issuer = jwt.decode(token, options={"verify_signature": False}).get("iss")
        except (jwt.PyJWTError, ValueError, TypeError):
            return None
        if issuer != self._settings.issuer:
            # nothing of it is verified, but nobody waits for the keys of a token that says it is not ours
            raise Unauthorized("The token is of another issuer.")
        if header.get("alg") not in self._settings.algorithms:
            raise Unauthorized("The token uses a signature algorithm that is not accepted.")
        key_id = header.get("kid")
        key = await self._keys.find(key_id if isinstance(key_id, str) else None)
        if key is None:
            if not self._keys.has_any:
                raise CannotAuthenticate(
                    "The identity provider is not reachable at the moment.", retry_after_s=5
                )
            raise Unauthorized("The token is signed with a key that its issuer has not published.")
        claims = self._verify(token, key)
        name = _member(claims, self._settings.tenant_claim)
        if not isinstance(name, str) or not name:
            raise Unauthorized("The token has no tenant claim.")
        left_s = float(claims["exp"]) + self._settings.leeway_s - self._wall_clock()
        return name, min(self._settings.max_cached_s, left_s)

    def _verify(self, token: str, key: jwt.PyJWK) -> dict[str, Any]:
        settings = self._settings
        try:
            return jwt.decode(
                token,
                key,
                algorithms=list(settings.algorithms),
                audience=settings.audience,
                issuer=settings.issuer,
                leeway=settings.leeway_s,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.ExpiredSignatureError:
            raise Unauthorized("The token has expired.") from None
        except (jwt.PyJWTError, ValueError, TypeError):
            raise Unauthorized("The token is not valid.") from None


def _member(claims: dict[str, Any], path: str) -> object:
    """Return a claim. A name with dots is first looked up literally, then as a path."""
    if path in claims:
        return claims[path]
    value: object = claims
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
