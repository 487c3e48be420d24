"""The contract of the session store: which backend is the home of which conversation.

There are two implementations: `memory` (one process, the default) and `redis_store` (shared by all
replicas). One test suite runs against both. Every implementation keeps these invariants:

* a session has at most one home at a time, and the first claim wins;
* `version` orders the homes of a session and is never used twice for one key, so an action on an older
  home (a late renewal, a slow fail-over) is refused and cannot restore that home;
* an entry expires `ttl_s` after its last claim, renewal or move;
* a failure of the store is never an exception: `None` means "continue without a binding".

The store does not know which backends exist: it returns a name to be looked up in the fleet, never an
address to connect to.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gateway.redis_link.breaker import BreakerState
from gateway.values import BackendId, Binding, SessionKey, StoreBudget

Listing = tuple[list[tuple[SessionKey, Binding]], str | None]
"""One page of sessions and the cursor of the next page, `None` after the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counters since the start and current gauges, for metrics and the admin API."""

    kind: str  # memory | redis
    num_sessions: int  # in memory: live entries; with Redis: entries of this replica's local cache
    is_degraded: bool = False  # sessions are served, but not all guarantees hold at the moment
    breaker: BreakerState = BreakerState.CLOSED
    num_local_hits: int = 0
    num_local_misses: int = 0
    num_evictions: int = 0
    num_pending_renewals: int = 0
    num_dropped_renewals: int = 0
    num_invalidations: int = 0
    is_invalidation_live: bool = True  # moves made by other replicas are received at once
    num_calls: int = 0  # round trips that requests waited for
    call_seconds_total: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)  # by kind: timeout, connection, refused, …


class Unknown(enum.Enum):
    """What a store answers when it would have to wait to know."""

    UNKNOWN = enum.auto()


class SessionStore(Protocol):
    """Every method is safe to cancel at any await and never raises when the store fails.

    `budget` bounds the wait of one request over all its calls: take it once from `budget()` and pass it to
    each call; without it, each call has its own full budget.
    """

    async def start(self) -> None:
        """Open connections and start background tasks. Succeeds even when Redis is unavailable."""
        ...

    async def close(self) -> None:
        """Flush what is pending, within one second, and stop the background tasks. Idempotent."""
        ...

    def budget(self) -> StoreBudget | None:
        """Return how long one request may wait; `None` if it never waits."""
        ...

    def peek(self, key: SessionKey) -> Binding | Unknown | None:
        """The home of this session if that is known without waiting. Does not extend the entry."""
        ...

    async def get(self, key: SessionKey, budget: StoreBudget | None = None) -> Binding | None:
        """Return the home of this session. A local hit does not suspend. Does not extend the entry."""
        ...

    async def claim(
        self,
        key: SessionKey,
        backend_id: BackendId,
        epoch: int,
        context_tokens: int = 0,
        budget: StoreBudget | None = None,
    ) -> Binding | None:
        """Bind a session that has no home. Returns the binding that won, perhaps to another backend.

        `None`: the store is unavailable or refused; the caller continues without a binding.
        """
        ...

    def renew(self, key: SessionKey, binding: Binding, *, context_tokens: int, num_turns: int) -> None:
        """Extend the entry and note its new size, if `binding` is still its home; else change nothing."""
        ...

    async def rebind(
        self,
        key: SessionKey,
        expected_version: int,
        backend_id: BackendId,
        epoch: int,
        context_tokens: int = 0,
        budget: StoreBudget | None = None,
    ) -> Binding | None:
        """Move the session if its version is the expected one. Returns its current binding.

        `None`: the session no longer exists, or the store is unavailable.
        """
        ...

    async def end(self, key: SessionKey) -> bool:
        """Forget the session. Returns whether there was one."""
        ...

    async def list_by_backend(
        self, backend_id: BackendId, *, cursor: str | None = None, limit: int = 100
    ) -> Listing:
        """Return a page of this backend's sessions. As with SCAN, a session that stays bound during the whole
        listing appears at least once; one that is used meanwhile may appear twice. A malformed cursor starts
        over. A page before the last may have fewer than `limit` sessions."""
        ...

    async def count_by_backend(self) -> dict[BackendId, int]:
        """Count the sessions of each backend; backends without any are left out."""
        ...

    def stats(self) -> StoreStats:
        """Return counters and gauges. No I/O."""
        ...
