"""Bearer tokens (JWT) of an identity provider: whose they are, and until when.

Accepted is only what the configuration names: issuer, audience, signature algorithms (public-key ones, fixed
here and not by the token), and an end. The token's claim names the tenant; whether that tenant may use this
gateway is not decided here.
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
    """`gatekeeper.Proof` by tokens. `start` begins to fetch the provider's keys."""

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

    def may_know(self, credential: str) -> bool:
        """Three parts, of which the first is a JSON object in base64."""
        return credential.startswith("eyJ") and credential.count(".") == 2

    async def prove(self, credential: str, digest: bytes) -> tuple[str, float] | None:
        try:
            header = jwt.get_unverified_header(credential)
        except jwt.InvalidTokenError:
            return None
        if header.get("alg") not in self._settings.algorithms:
            raise Unauthorized("The token is signed in a way that is not accepted here.")
        key_id = header.get("kid")
        key = await self._keys.find(key_id if isinstance(key_id, str) else None)
        if key is None:
            if not self._keys.has_any:
                raise CannotAuthenticate("The identity provider cannot be reached now.", retry_after_s=5)
            raise Unauthorized("The token is signed with a key that its issuer does not publish.")
        claims = self._verify(credential, key)
        name = _member(claims, self._settings.tenant_claim)
        if not isinstance(name, str) or not name:
            raise Unauthorized("The token names no tenant.")
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
            raise Unauthorized("The token is not valid here.") from None


def _member(claims: dict[str, Any], path: str) -> object:
    """Return a claim; a name that holds dots is looked for as it is first."""
    if path in claims:
        return claims[path]
    value: object = claims
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value
