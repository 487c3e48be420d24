"""The contract of the session store: which backend is the home of which conversation.

Two implementations keep it: `memory` (one process, the default) and `redis_store` (shared by all
replicas). One test suite runs against both. The invariants every implementation owes:

* a session has at most one home at a time, and the first claim wins;
* `version` orders the homes of a session and is never used twice for one key, so whoever acts on an
  older home (a late renewal, a slow fail-over) is refused and can never bring that home back;
* an entry lives `ttl_s` from its last claim, renewal or move, and is absent from that moment on;
* trouble with the store is never an exception: `None` means "go on without a binding".

The store does not know which backends exist: what it returns is a name to be looked up in the fleet,
never an address to be dialled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gateway.redis_link.breaker import BreakerState
from gateway.values import BackendId, Binding, SessionKey

Listing = tuple[list[tuple[SessionKey, Binding]], str | None]
"""One page of sessions and the cursor of the next page; `None` when this was the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counters since the start and gauges of this moment, for metrics and the admin page."""

    kind: str  # memory | redis
    num_sessions: int  # in memory: live entries; with Redis: entries of this replica's local cache
    is_degraded: bool = False  # sessions are served, but not all that is promised holds just now
    breaker: BreakerState = BreakerState.CLOSED
    num_local_hits: int = 0
    num_local_misses: int = 0
    num_evictions: int = 0
    num_pending_renewals: int = 0
    num_dropped_renewals: int = 0
    num_invalidations: int = 0
    is_invalidation_live: bool = True  # moves made by other replicas are seen at once
    num_calls: int = 0  # round trips that a request waited for
    call_seconds_total: float = 0.0
    errors: Mapping[str, int] = field(default_factory=dict)  # by kind: timeout, connection, refused, …


class SessionStore(Protocol):
    """What the proxy asks. Every method is safe to cancel at any await and never raises for store trouble.

    `deadline_s` bounds the wait of one request over all its calls: take it once from `deadline()` and pass
    it to each; without it, each call has a whole budget of its own.
    """

    async def start(self) -> None:
        """Open connections and background tasks. Succeeds even when the shared store is away."""
        ...

    async def close(self) -> None:
        """Flush what is pending, within a second, and end the background tasks. Idempotent."""
        ...

    def deadline(self) -> float:
        """The time, on the store's own clock, until which a request that starts now may wait for it."""
        ...

    async def get(self, key: SessionKey, deadline_s: float | None = None) -> Binding | None:
        """The home of this session. A hit in this process does not suspend. Does not extend the entry."""
        ...

    async def claim(
        self,
        key: SessionKey,
        backend_id: BackendId,
        epoch: int,
        context_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> Binding | None:
        """Bind a session that has no home. Returns the winner's binding, perhaps to another backend.

        `None`: the store is away or refused; the caller goes on unpinned.
        """
        ...

    async def renew(self, key: SessionKey, binding: Binding, *, context_tokens: int, num_turns: int) -> None:
        """Extend the entry and note its new size, if `binding` is still its home; else change nothing."""
        ...

    async def rebind(
        self,
        key: SessionKey,
        expected_version: int,
        backend_id: BackendId,
        epoch: int,
        context_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> Binding | None:
        """Move the session if its version is the expected one; returns what the table holds now.

        `None`: there is no such session any more, or the store is away.
        """
        ...

    async def end(self, key: SessionKey) -> bool:
        """Forget the session; true if there was one."""
        ...

    async def list_by_backend(
        self, backend_id: BackendId, *, cursor: str | None = None, limit: int = 100
    ) -> Listing:
        """A page of this backend's sessions. Like SCAN: a session that stays bound during the whole walk is
        listed at least once; one that is used meanwhile may be listed twice. A cursor that means nothing
        starts over. A page may hold fewer than `limit` before the end."""
        ...

    async def count_by_backend(self) -> dict[BackendId, int]:
        """How many sessions each backend is home to; backends without any are left out."""
        ...

    def stats(self) -> StoreStats:
        """Counters and gauges; costs no I/O."""
        ...
