"""Carries the news of replicas (`routing/news.py`) over Redis, once a second, never on the request path.

Each replica writes its last rounds into one field of one hash, numbered, and reads the fields of the others
in the same call, as with loads. Several rounds, so that a reader who comes a little late misses none. A field
ends after three seconds. While Redis is unavailable nothing is told, and each replica knows its own requests.
"""

from __future__ import annotations

import uuid
from collections import deque
from typing import Final, Protocol

import msgspec

from gateway.redis_link.link import RedisLink, Unavailable
from gateway.redis_link.lua import load_script
from gateway.replicas.loads import LIFETIME_S
from gateway.routing.news import News

_NUM_ROUNDS: Final = 3
_MAX_PAYLOAD_BYTES: Final = 4 << 20


class SharedNews(Protocol):
    """Never raises when Redis fails."""

    has_others: bool
    """Whether there may be other replicas."""

    async def exchange(self, news: News) -> list[News]:
        """Tell this replica's news; return what others have told since the last call."""
        ...


class NoNews:
    """A single process: there are no others."""

    has_others = False

    async def exchange(self, news: News) -> list[News]:
        return []


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """What one replica has in its field."""

    replica: str
    rounds: list[tuple[int, News]]  # numbered


class RedisNews:
    """News in Redis, over the link of the session store."""

    has_others = True

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._replica = uuid.uuid4().hex
        self._script = load_script("loads")
        self._decoder = msgspec.json.Decoder(_Told)
        self._number = 0
        self._rounds: deque[tuple[int, News]] = deque(maxlen=_NUM_ROUNDS)
        self._seen: dict[str, int] = {}  # the last round of each other replica

    async def exchange(self, news: News) -> list[News]:
        self._number += 1
        self._rounds.append((self._number, news))
        payload = msgspec.json.encode(_Told(self._replica, list(self._rounds)))
        arguments = [self._replica, payload, round(LIFETIME_S * 1000)]

        async def call() -> object:
            return await self._link.run(self._script, [self._link.layout.news], arguments)

        try:
            payloads = await self._link.ask_patiently(0, call)
        except Unavailable:
            return []
        return self._new(payloads) if isinstance(payloads, list) else []

    def _new(self, payloads: list[object]) -> list[News]:
        """Return the rounds not seen before. A replica that is met for the first time tells its last ones."""
        found: list[News] = []
        seen: dict[str, int] = {}
        for payload in payloads:
            if not isinstance(payload, bytes) or len(payload) > _MAX_PAYLOAD_BYTES:
                continue
            try:
                told = self._decoder.decode(payload)
            except (msgspec.DecodeError, RecursionError):
                self._link.errors["odd_value"] += 1
                continue
            last = seen[told.replica] = self._seen.get(told.replica, 0)
            for number, news in told.rounds[-_NUM_ROUNDS:]:
                if number > last:
                    found.append(news)
                    seen[told.replica] = max(seen[told.replica], number)
        self._seen = seen
        return found
