"""What this replica remembers of the shared store, so that a bound session's turn asks nobody.

An entry is *trusted* if it was read from Redis since the invalidation channel has been working without a
gap (every later move was then heard), or else if it was read less than `trust_s` ago. An entry that is not
trusted is still returned, marked so: it is checked with Redis if Redis answers and used if it does not.

Answers may arrive in any order: one to an older question never replaces a greater version, and a void version
is remembered for a while (`_floors`), so that a slow reader cannot put back what was declared void meanwhile.
But an answer to a *later* question that shows a smaller version says that Redis has lost data (a fail-over
before the move was copied), and then Redis is right: otherwise replicas would disagree for good.

Bounded by number; the entry written longest ago goes first. Knows no I/O; all times are the caller's.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from gateway.sessions.records import Record
from gateway.values import SessionKey

MAX_FLOORS = 10_000  # only those of the last milliseconds matter: reads under way when a move was heard


class Entry(Record, gc=False, kw_only=True):
    """A record, with the time at which the question that brought it was sent."""

    read_at_s: float


class LocalCache:
    """Least recently written entry goes first; see the module."""

    def __init__(self, *, max_entries: int, trust_s: float) -> None:
        self._max_entries = max_entries
        self._trust_s = trust_s
        self._entries: OrderedDict[SessionKey, Entry] = OrderedDict()
        self._floors: OrderedDict[SessionKey, tuple[int, float]] = OrderedDict()  # version, when heard
        self.trusted_since_s = math.inf  # set by the invalidation channel; infinite while it does not work
        self.num_evictions = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: SessionKey, now_s: float) -> Entry | None:
        """The entry, unless it has expired. Expired ones are dropped."""
        entry = self._entries.get(key)
        if entry is not None and entry.expires_at_s <= now_s:
            del self._entries[key]
            return None
        return entry

    def is_trusted(self, entry: Entry, now_s: float) -> bool:
        return entry.read_at_s >= self.trusted_since_s or now_s - entry.read_at_s < self._trust_s

    def put(self, key: SessionKey, record: Record, read_at_s: float) -> Record:
        """Remember what Redis said, unless something newer is known. Returns what is known now."""
        held = self._entries.get(key)
        if held is not None and held.version > record.version and read_at_s <= held.read_at_s:
            return held
        floor, heard_at_s = self._floors.get(key, (0, 0.0))
        if record.version < floor and read_at_s <= heard_at_s:
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
            # Our renewal of this same home has not reached Redis yet: what we know is newer.
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
        """Note a turn of a session, if this version is what is remembered. Does not make it more trusted."""
        entry = self._entries.get(key)
        if entry is None or entry.version != version:
            return
        entry.expires_at_s = expires_at_s
        entry.context_tokens = context_tokens
        entry.num_turns = max(entry.num_turns, num_turns)
        self._entries.move_to_end(key)

    def confirm(self, key: SessionKey, version: int, read_at_s: float) -> None:
        """Redis has just said that this version still holds."""
        entry = self._entries.get(key)
        if entry is not None and entry.version == version:
            entry.read_at_s = max(entry.read_at_s, read_at_s)

    def doubt(self, key: SessionKey, version: int) -> None:
        """Redis does not know this home any more: ask before the entry is used again."""
        entry = self._entries.get(key)
        if entry is not None and entry.version == version:
            entry.read_at_s = -math.inf

    def drop_below(self, key: SessionKey, version: int, heard_at_s: float) -> None:
        """All copies below this version are void, also those still on their way here."""
        entry = self._entries.get(key)
        if entry is not None and entry.version < version:
            del self._entries[key]
        floor, _ = self._floors.pop(key, (0, 0.0))
        self._floors[key] = (max(version, floor), heard_at_s)
        if len(self._floors) > MAX_FLOORS:
            self._floors.popitem(last=False)

    def drop(self, key: SessionKey) -> None:
        self._entries.pop(key, None)
