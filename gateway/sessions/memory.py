"""The in-process session store: one process, no network, a hard bound on memory.

Each backend has a *line*: its sessions as a linked list, least recently used first. All sessions have the
same time to live, so the order of last use is also the order of expiry, and one list serves four purposes:
expiry (drop from the front), eviction at the cap (the front that expires first), the index per backend, and
paging. Every operation is O(1), except eviction at the cap, which is O(number of backends).

Why not `OrderedDict` plus a set per backend: about 100 bytes more per session, over the budget of 400. The
garbage collector does not track records (see `records.py`); they form cycles, which `unlink` always breaks.

The table is split into 64 dicts because growing a single dict of a million entries blocks the loop for tens
of milliseconds.

Invariant: a record is in its table if and only if it is in the line of its backend.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from gateway.sessions.records import Record, as_binding
from gateway.sessions.store import Listing, StoreStats
from gateway.values import BackendId, Binding, SessionKey, StoreBudget

NUM_TABLES = 64  # a power of two: the hash of a key is masked to find its table
TABLE_MASK = NUM_TABLES - 1
SWEEP_PER_WRITE = 4  # expired records dropped per write: more than one, so that sweeping catches up


class _Record(Record, gc=False, kw_only=True):
    """One session. `older` and `newer` are its neighbours in the line of its backend."""

    key: SessionKey
    older: Any = None  # _Record | None; Any because msgspec cannot resolve recursive local names
    newer: Any = None


class _Line:
    """The sessions of one backend, least recently used first."""

    __slots__ = ("newest", "oldest", "size")

    def __init__(self) -> None:
        self.oldest: _Record | None = None
        self.newest: _Record | None = None
        self.size = 0

    def append(self, record: _Record) -> None:
        """Add a record that is in no line at the newest end."""
        record.older = self.newest
        record.newer = None
        if self.newest is None:
            self.oldest = record
        else:
            self.newest.newer = record
        self.newest = record
        self.size += 1

    def unlink(self, record: _Record) -> None:
        """Remove a record from this line and clear its references to its neighbours."""
        if record.older is None:
            self.oldest = record.newer
        else:
            record.older.newer = record.newer
        if record.newer is None:
            self.newest = record.older
        else:
            record.newer.older = record.older
        record.older = record.newer = None
        self.size -= 1

    def __iter__(self) -> Iterator[_Record]:
        record = self.oldest
        while record is not None:
            yield record
            record = record.newer


class MemoryStore:
    """`SessionStore` in the memory of this process. Never degraded, never waits."""

    def __init__(
        self,
        *,
        ttl_s: float = 3600.0,
        max_sessions: int = 1_000_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._tables: tuple[dict[SessionKey, _Record], ...] = tuple({} for _ in range(NUM_TABLES))
        self._lines: dict[BackendId, _Line] = {}
        self._num_sessions = 0
        self._last_version = (
            0  # one counter for all keys: no version is used twice, even after a session ends
        )
        self._last_expiry_s = -math.inf
        self._num_hits = 0
        self._num_misses = 0
        self._num_evictions = 0

    def __repr__(self) -> str:
        size = f"{self._num_sessions} of {self._max_sessions} sessions"
        return f"<MemoryStore {size} on {len(self._lines)} backends>"

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Drop everything and break the cycles, which the garbage collector does not see."""
        for line in self._lines.values():
            while line.oldest is not None:
                line.unlink(line.oldest)
        self._lines.clear()
        for table in self._tables:
            table.clear()
        self._num_sessions = 0

    def budget(self) -> StoreBudget | None:
        return None

    async def get(self, key: SessionKey, budget: StoreBudget | None = None) -> Binding | None:
        return self.peek(key)

    def peek(self, key: SessionKey) -> Binding | None:
        record = self._tables[hash(key) & TABLE_MASK].get(key)
        if record is None or record.expires_at_s <= self._clock():
            self._num_misses += 1
            return None
        self._num_hits += 1
        return as_binding(record, record.expires_at_s)

    async def claim(
        self,
        key: SessionKey,
        backend_id: BackendId,
        epoch: int,
        context_tokens: int = 0,
        budget: StoreBudget | None = None,
    ) -> Binding | None:
        now_s = self._clock()
        record = self._live_record(key, now_s)
        if record is None:
            self._sweep(backend_id, now_s)
            if self._num_sessions >= self._max_sessions:
                self._evict_least_recently_used()
            self._last_version += 1
            record = _Record(
                backend_id, epoch, self._last_version, self._next_expiry(now_s), context_tokens, 0, key=key
            )
            self._tables[hash(key) & TABLE_MASK][key] = record
            self._line(backend_id).append(record)
            self._num_sessions += 1
        return as_binding(record, record.expires_at_s)

    def renew(self, key: SessionKey, binding: Binding, *, context_tokens: int, num_turns: int) -> None:
        now_s = self._clock()
        record = self._live_record(key, now_s)
        if record is None or record.version != binding.version:
            return
        record.expires_at_s = self._next_expiry(now_s)
        record.context_tokens = context_tokens
        record.num_turns = max(record.num_turns, num_turns)
        line = self._lines[record.backend_id]
        line.unlink(record)
        line.append(record)

    async def rebind(
        self,
        key: SessionKey,
        expected_version: int,
        backend_id: BackendId,
        epoch: int,
        context_tokens: int = 0,
        budget: StoreBudget | None = None,
    ) -> Binding | None:
        now_s = self._clock()
        record = self._live_record(key, now_s)
        if record is None:
            return None
        if record.version == expected_version:
            self._leave_line(record)
            self._last_version += 1
            record.backend_id = backend_id
            record.epoch = epoch
            record.version = self._last_version
            record.expires_at_s = self._next_expiry(now_s)
            record.context_tokens = context_tokens
            self._line(backend_id).append(record)
        return as_binding(record, record.expires_at_s)

    async def end(self, key: SessionKey) -> bool:
        record = self._live_record(key, self._clock())
        if record is None:
            return False
        self._drop(record)
        return True

    async def list_by_backend(
        self, backend_id: BackendId, *, cursor: str | None = None, limit: int = 100
    ) -> Listing:
        """Lists the least recently used first. The cursor is the last listed session and its expiry, so a
        page starts in O(1), unless that session was used since: then its place is searched from the front."""
        line = self._lines.get(backend_id)
        if line is None:
            return [], None
        now_s = self._clock()
        page: list[tuple[SessionKey, Binding]] = []
        record = self._resume(line, cursor)
        while record is not None and len(page) < limit:
            if record.expires_at_s > now_s:
                page.append((record.key, as_binding(record, record.expires_at_s)))
            record = record.newer
        if record is None or not page:
            return page, None
        last_key, last = page[-1]
        return page, f"{last.expires_at_s!r} {last_key}"

    async def count_by_backend(self) -> dict[BackendId, int]:
        now_s = self._clock()
        for backend_id in list(self._lines):
            self._sweep(backend_id, now_s, limit=self._num_sessions)
        return {backend_id: line.size for backend_id, line in self._lines.items()}

    def stats(self) -> StoreStats:
        return StoreStats(
            kind="memory",
            num_sessions=self._num_sessions,
            num_local_hits=self._num_hits,
            num_local_misses=self._num_misses,
            num_evictions=self._num_evictions,
        )

    # --- private ---------------------------------------------------------------------------------

    def _live_record(self, key: SessionKey, now_s: float) -> _Record | None:
        """Return the record of a live session; an expired one is dropped."""
        record = self._tables[hash(key) & TABLE_MASK].get(key)
        if record is not None and record.expires_at_s <= now_s:
            self._drop(record)
            return None
        return record

    def _next_expiry(self, now_s: float) -> float:
        """Return the expiry of an entry used now. Strictly increasing, by the smallest possible step, so that
        an expiry also identifies a place in its line, however coarse the clock is."""
        self._last_expiry_s = max(now_s + self._ttl_s, math.nextafter(self._last_expiry_s, math.inf))
        return self._last_expiry_s

    def _line(self, backend_id: BackendId) -> _Line:
        line = self._lines.get(backend_id)
        if line is None:
            line = self._lines[backend_id] = _Line()
        return line

    def _leave_line(self, record: _Record) -> None:
        """Unlink, and delete an empty line: backends come and go."""
        backend_id = record.backend_id
        line = self._lines[backend_id]
        line.unlink(record)
        if line.size == 0:
            del self._lines[backend_id]

    def _drop(self, record: _Record) -> None:
        del self._tables[hash(record.key) & TABLE_MASK][record.key]
        self._leave_line(record)
        self._num_sessions -= 1

    def _sweep(self, backend_id: BackendId, now_s: float, limit: int = SWEEP_PER_WRITE) -> None:
        """Drop expired records from the front of one line. Lines without writes keep theirs until they are
        counted or evicted; `get` never returns them."""
        line = self._lines.get(backend_id)
        if line is None:
            return
        for _ in range(limit):
            oldest = line.oldest
            if oldest is None or oldest.expires_at_s > now_s:
                return
            self._drop(oldest)

    def _evict_least_recently_used(self) -> None:
        fronts = [line.oldest for line in self._lines.values() if line.oldest is not None]
        self._drop(min(fronts, key=lambda record: record.expires_at_s))
        self._num_evictions += 1

    def _resume(self, line: _Line, cursor: str | None) -> _Record | None:
        """Return the record after the cursor: O(1) if the session there was not used since, else found by a
        search from the front, O(sessions listed so far)."""
        if cursor is None:
            return line.oldest
        text, _, key = cursor.partition(" ")
        try:
            expires_at_s = float(text)
        except ValueError:
            return line.oldest
        record: _Record | None = self._tables[hash(key) & TABLE_MASK].get(SessionKey(key))
        if record is not None and record.expires_at_s == expires_at_s and self._is_in(record, line):
            newer: _Record | None = record.newer
            return newer
        return next((other for other in line if other.expires_at_s > expires_at_s), None)

    def _is_in(self, record: _Record, line: _Line) -> bool:
        return self._lines.get(record.backend_id) is line
