"""Listing and counting the sessions of a backend in Redis, for the admin API and drains; never per request.

The index of a backend is a sorted set per shard, scored by expiry. Renewed sessions move towards the end, so
listing in that order returns each session that stays bound at least once. The index may contain sessions that
have just expired or moved; the session's own key is authoritative.

A cursor is `<shard> <expiry in ms> <session key>`: the place of the last session listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from gateway.redis_link.link import RedisLink
from gateway.redis_link.lua import load_script
from gateway.sessions.codec import decode_reply, load_binding_script
from gateway.sessions.records import as_binding
from gateway.sessions.store import Listing
from gateway.values import BackendId, Binding, SessionKey


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A place just after a member of a shard's index. Members of equal score are ordered by their bytes."""

    shard: int
    score: int = 0
    member: bytes = b""

    @classmethod
    def parse(cls, cursor: str | None, num_shards: int) -> _Place:
        """Parse a cursor; a malformed one means the beginning."""
        shard, _, rest = (cursor or "").partition(" ")
        score, _, member = rest.partition(" ")
        if not (shard.isdecimal() and score.isdecimal() and len(score) < 17 and int(shard) < num_shards):
            return cls(shard=0)
        return cls(shard=int(shard), score=int(score), member=member.encode("utf-8", "replace"))

    def __str__(self) -> str:
        return f"{self.shard} {self.score} {self.member.decode('utf-8', 'replace')}"


class RedisListing:
    """Reads the indexes over the store's link. Raises Unavailable."""

    def __init__(self, link: RedisLink, wall_clock: Callable[[], float]) -> None:
        self._link = link
        self._wall_clock = wall_clock
        self._list = load_binding_script("list")
        self._count = load_script("count")

    async def page(self, backend_id: BackendId, cursor: str | None, limit: int) -> Listing:
        """One page, gathered from as many shards as it needs."""
        place = _Place.parse(cursor, self._link.layout.num_shards)
        page: list[tuple[SessionKey, Binding]] = []
        while place.shard < self._link.layout.num_shards:
            found, place_after = await self._page_of_shard(backend_id, place, limit - len(page))
            page += found
            if place_after is not None:
                place = place_after
                if len(page) >= limit:
                    return page, str(place)
            else:
                place = _Place(shard=place.shard + 1)
        return page, None

    async def counts(self) -> dict[BackendId, int]:
        """Count the live sessions of each backend, over all shards."""
        counts: Counter[BackendId] = Counter()
        layout = self._link.layout
        for shard in range(layout.num_shards):
            keys = [layout.names(shard), layout.index_prefix(shard)]

            async def count(keys: list[str] = keys) -> list[bytes | int]:
                reply: list[bytes | int] = await self._link.run(self._count, keys, [])
                return reply

            fields = await self._link.ask_patiently(shard, count)
            for name, number in zip(fields[::2], fields[1::2], strict=True):
                if isinstance(name, bytes) and isinstance(number, int):
                    counts[BackendId(name.decode("utf-8", "replace"))] += number
        return dict(counts)

    async def _page_of_shard(
        self, backend_id: BackendId, place: _Place, limit: int
    ) -> tuple[list[tuple[SessionKey, Binding]], _Place | None]:
        """Return the sessions after a place, and the place after them; `None` at the end of the shard. Rows
        of equal score before the place are read again and skipped."""
        layout = self._link.layout
        keys = [layout.index(place.shard, backend_id), layout.session(place.shard, SessionKey(""))]
        found: list[tuple[SessionKey, Binding]] = []
        offset = 0
        while True:

            async def ask(offset: int = offset) -> list[list[bytes | int]]:
                arguments = [place.score, offset, limit, backend_id]
                reply: list[list[bytes | int]] = await self._link.run(self._list, keys, arguments)
                return reply

            rows = await self._link.ask_patiently(place.shard, ask)
            last = place
            for score, member, value, ttl_ms in rows:
                if not isinstance(score, bytes) or not isinstance(member, bytes):
                    continue
                here = _Place(shard=place.shard, score=int(float(score)), member=member)
                if (here.score, here.member) <= (place.score, place.member):
                    continue
                last = here
                record = decode_reply([value, ttl_ms], self._wall_clock())
                if record is not None:
                    found.append((_key(member), as_binding(record, record.expires_at_s)))
            if len(rows) < limit:
                return found, None
            if found:
                return found, last
            offset += limit


def _key(member: bytes) -> SessionKey:
    return SessionKey(member.decode("utf-8", "replace"))
