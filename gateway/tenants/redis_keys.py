"""API keys stored in Redis, so that they can be added and revoked without reloading a gateway.

One hash: hex SHA-256 of a key → name of its tenant. Redis never holds the keys themselves. While Redis is
unavailable a key that is not cached cannot be checked; the error differs from that for a wrong key.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.errors import CannotAuthenticate
from gateway.redis_link.link import RedisLink, Unavailable


class RedisKeys:
    """`tenants.gatekeeper.Proof` by keys in Redis."""

    def __init__(self, link: RedisLink, *, ttl_s: float, clock: Callable[[], float]) -> None:
        self._link, self._ttl_s, self._clock = link, ttl_s, clock

    def may_know(self, credential: bytes) -> bool:
        return True

    async def prove(self, credential: bytes, digest: bytes) -> tuple[str, float] | None:
        async def look_up() -> object:
            return await self._link.command("HGET", self._link.layout.api_keys, digest.hex())

        try:
            name = await self._link.ask(0, look_up, self._link.budget())
        except Unavailable as error:
            raise CannotAuthenticate(
                "API keys cannot be checked at the moment; try again.", retry_after_s=1
            ) from error
        if not isinstance(name, bytes):
            return None
        return name.decode("utf-8", "replace"), self._ttl_s
