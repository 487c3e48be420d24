"""This replica's cache of the shared store, so that a turn of a bound session needs no round trip.

An entry is *trusted* if it was read from Redis while the invalidation channel worked without a gap since
(every later move was then received), or if it was read less than `trust_s` ago. `find` also returns entries
that are not trusted: the caller checks them with Redis, and uses them if Redis does not answer.

Replies may arrive in any order. The reply to an older query never replaces a greater version, and void
versions are remembered for a while (`_floors`), so that a slow read cannot restore what has been invalidated
since. But if the reply to a *later* query has a smaller version, Redis has lost data (a fail-over before the
move was replicated). Then Redis wins, or replicas would disagree permanently.

Bounded in number; the least recently written entry goes first. No I/O; the caller passes all times.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from gateway.sessions.records import Record
from gateway.values import SessionKey

MAX_FLOORS = 10_000  # only the last milliseconds matter: reads in flight when a move was received


class Entry(Record, gc=False, kw_only=True):
    """A record, with the time at which the query for it was sent."""

    read_at_s: float


class LocalCache:
    """Bounded, least recently written first; see the module."""

    def __init__(self, *, max_entries: int, trust_s: float) -> None:
        self._max_entries = max_entries
        self._trust_s = trust_s
        self._entries: OrderedDict[SessionKey, Entry] = OrderedDict()
        self._floors: OrderedDict[SessionKey, tuple[int, float]] = OrderedDict()  # version, when received
        self.trusted_since_s = math.inf  # set by the invalidation channel; infinite while it is broken
        self.num_evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: SessionKey, now_s: float) -> Entry | None:
        """Return the entry. An expired one is dropped."""
        entry = self._entries.get(key)
        if entry is not None and entry.expires_at_s <= now_s:
            del self._entries[key]
            return None
        return entry

    def is_trusted(self, entry: Entry, now_s: float) -> bool:
        return entry.read_at_s >= self.trusted_since_s or now_s - entry.read_at_s < self._trust_s

    def put(self, key: SessionKey, record: Record, read_at_s: float) -> Record:
        """Store what Redis returned, unless something newer is known. Returns what is known now."""
        held = self._entries.get(key)
        if held is not None and held.version > record.version and read_at_s <= held.read_at_s:
            return held
        floor, received_at_s = self._floors.get(key, (0, 0.0))
        if record.version < floor and read_at_s <= received_at_s:
            return record
        entry = Entry(
            record.backend_id,
            record.epoch,
            record.version,
            record.expires_at_s,
            record.context_tokens,
            record.num_turns,
            read_at_s=read_at_s,
        )
        if held is not None and held.version == record.version and held.num_turns > record.num_turns:
            # Our renewal of this home has not reached Redis yet: our values are newer.
            entry.context_tokens = held.context_tokens
            entry.num_turns = held.num_turns
            entry.expires_at_s = max(held.expires_at_s, record.expires_at_s)
        self._entries[key] = entry
        self._entries.move_to_end(key)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
            self.num_evictions += 1
        return entry

    def renew(
        self, key: SessionKey, version: int, *, expires_at_s: float, context_tokens: int, num_turns: int
    ) -> None:
        """Note a turn of a session, if this version is cached. Does not extend its trust."""
        entry = self._entries.get(key)
        if entry is None or entry.version != version:
            return
        entry.expires_at_s = expires_at_s
        entry.context_tokens = context_tokens
        entry.num_turns = max(entry.num_turns, num_turns)
        self._entries.move_to_end(key)

    def confirm(self, key: SessionKey, version: int, read_at_s: float) -> None:
        """Redis has confirmed this version."""
        entry = self._entries.get(key)
        if entry is not None and entry.version == version:
            entry.read_at_s = max(entry.read_at_s, read_at_s)

    def doubt(self, key: SessionKey, version: int) -> None:
        """Redis no longer has this home: ask before the entry is used again."""
        entry = self._entries.get(key)
        if entry is not None and entry.version == version:
            entry.read_at_s = -math.inf

    def drop_below(self, key: SessionKey, version: int, received_at_s: float) -> None:
        """Invalidate all copies below this version, including those of replies still in flight."""
        entry = self._entries.get(key)
        if entry is not None and entry.version < version:
            del self._entries[key]
        floor, _ = self._floors.pop(key, (0, 0.0))
        self._floors[key] = (max(version, floor), received_at_s)
        if len(self._floors) > MAX_FLOORS:
            self._floors.popitem(last=False)

    def drop(self, key: SessionKey) -> None:
        self._entries.pop(key, None)
