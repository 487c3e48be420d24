"""The public keys of an identity provider (JWKS), fetched in the background and cached.

They are fetched at start, at intervals, and when a token names an unknown key, which is how a rotation is
noticed; the latter at most every few seconds, because clients choose that name. While the provider is
unavailable the keys of the last successful fetch stay in use. No request waits for a known key, and the wait
for an unknown one is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import httpx
import jwt

from gateway.observability.logs import log_event

FETCH_TIMEOUT_S = 5.0
WAIT_S = 2.0  # of a request for an unknown key
MIN_INTERVAL_S = 5.0
MAX_BYTES = 1024 * 1024


class ProviderKeys:
    """Owns one background task."""

    def __init__(self, url: str, refresh_s: float, *, clock: Callable[[], float]) -> None:
        self._url, self._refresh_s, self._clock = url, refresh_s, clock
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._fetched_s = float("-inf")
        self._is_wanted, self._has_fetched = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def has_any(self) -> bool:
        """Whether the keys have ever been fetched."""
        return bool(self._keys)

    def start(self) -> None:
        self._task = asyncio.create_task(self._fetch_forever(), name="provider-keys")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def find(self, key_id: str | None) -> jwt.PyJWK | None:
        """Return the key of this name. For an unknown one, fetch first, unless the last fetch is recent.

        Without a name, the provider's only key is meant (the name is optional in RFC 7515, 4.1.4).
        """
        found = self._lookup(key_id)
        if found is None and self._clock() - self._fetched_s >= MIN_INTERVAL_S:
            self._has_fetched.clear()
            self._is_wanted.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    await self._has_fetched.wait()
            found = self._lookup(key_id)
        return found

    def _lookup(self, key_id: str | None) -> jwt.PyJWK | None:
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(key_id)

    async def _fetch_forever(self) -> None:
        while True:
            await self._fetch()
            self._fetched_s = self._clock()
            self._has_fetched.set()
            self._is_wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_s if self._keys else MIN_INTERVAL_S):
                    await self._is_wanted.wait()

    async def _fetch(self) -> None:
        """Replace the keys with those published now; keep them if that fails."""
        try:
            keys = parse_key_set(await self._read())
        except (httpx.HTTPError, OSError, ValueError) as error:
            log_event("provider_keys_unavailable", level=logging.WARNING, reason=str(error)[:200])
            return
        if keys.keys() != self._keys.keys():
            log_event("provider_keys_changed", num_keys=len(keys))
        self._keys = keys

    async def _read(self) -> bytes:
        async with (
            httpx.AsyncClient(timeout=FETCH_TIMEOUT_S, follow_redirects=False) as client,
            client.stream("GET", self._url) as response,
        ):
            response.raise_for_status()
            body = b""
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > MAX_BYTES:
                    raise ValueError(f"the key set is larger than {MAX_BYTES} bytes")
            return body


def parse_key_set(body: bytes) -> dict[str | None, jwt.PyJWK]:
    """Return the usable signature keys of a JWKS document. Raises ValueError."""
    try:
        key_set = jwt.PyJWKSet.from_json(body.decode("utf-8"))
    except (jwt.PyJWTError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"not a usable key set: {type(error).__name__}") from error
    return {key.key_id: key for key in key_set.keys if key.public_key_use in (None, "sig")}
