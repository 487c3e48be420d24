"""The session store shared by all replicas, in Redis, with a local cache in front.

What a request costs:

* a turn of a session that is cached here: no round trip; its renewal is sent later, in a batch;
* the first turn here, or one whose cached copy is no longer trusted: one round trip (`read`);
* a new session or a move: one more, which decides between replicas (`claim`, `rebind`);
* never more than its budget in total, and nothing while the breaker is open.

While Redis is unavailable, cached bindings are used until they expire; claims and moves return `None`, and
the caller places by the ring, on which all replicas agree. Recovery is automatic.

The rules are in the Lua scripts, not here: each script is one atomic step on one shard.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from gateway.observability.logs import log_event
from gateway.redis_link.breaker import BreakerState
from gateway.redis_link.link import RedisLink, Unavailable
from gateway.redis_link.settings import RedisSettings
from gateway.sessions.codec import MAX_TOKENS, MAX_TURNS, decode_reply, is_storable, load_binding_script
from gateway.sessions.invalidation import InvalidationChannel
from gateway.sessions.local_cache import LocalCache
from gateway.sessions.records import Record, as_binding
from gateway.sessions.redis_listing import RedisListing
from gateway.sessions.renewals import PendingRenewals, Renewal
from gateway.sessions.store import Listing, StoreStats, Unknown
from gateway.values import BackendId, Binding, SessionKey, StoreBudget

logger = logging.getLogger(__name__)

RENEWALS_PER_CALL = 100  # about 1 ms of server time


class RedisStore:
    """`SessionStore` shared through Redis; see the module."""

    def __init__(
        self,
        settings: RedisSettings,
        *,
        ttl_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        environ: Mapping[str, str] = os.environ,
        beside: RedisStore | None = None,
    ) -> None:
        """`beside`: another store whose link this one uses, for homes that never move, under other keys.

        The other one must be started before and closed after it.
        """
        self._settings = settings
        self._ttl_s = ttl_s
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._clock = clock
        self._wall_clock = wall_clock
        self._wall_offset_s = wall_clock() - clock()
        self._owns_link = beside is None
        self.link: RedisLink = (
            RedisLink(settings, clock=clock, environ=environ) if beside is None else beside.link
        )
        self._layout = self.link.layout if beside is None else self.link.layout.for_objects()
        self._local = LocalCache(max_entries=settings.local_max_sessions, trust_s=settings.local_ttl_s)
        per_shard = -(-settings.max_pending_renewals // self._layout.num_shards)
        self._pending = [PendingRenewals(per_shard) for _ in range(self._layout.num_shards)]
        self._channel = InvalidationChannel(
            self.link,
            replica=uuid.uuid4().hex,
            interval_s=settings.heartbeat_interval_ms / 1000,
            on_move=self._hear_move,
            clock=clock,
        )
        self._listing = RedisListing(self.link, wall_clock)
        self._read = load_binding_script("read")
        self._claim = load_binding_script("claim")
        self._rebind = load_binding_script("rebind")
        self._renew = load_binding_script("renew")
        self._end = load_binding_script("end")
        self._tasks: list[asyncio.Task[None]] = []
        self._num_hits = 0
        self._num_misses = 0
        self._is_refused = False

    def __repr__(self) -> str:
        return (
            f"<RedisStore breaker {self.link.breaker_state.value}, {len(self._local)} sessions cached, "
            f"{sum(map(len, self._pending))} renewals pending>"
        )

    async def start(self) -> None:
        flushing = asyncio.create_task(self._flush_forever(), name="session-renewals")
        if not self._owns_link:
            self._tasks = [flushing]
            return
        await self.link.warm_up()
        self._tasks = [
            flushing,
            asyncio.create_task(self._channel.run(self._set_trust), name="session-channel"),
            asyncio.create_task(self._probe_forever(), name="session-probe"),
        ]

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self.flush()
        running = set(self._tasks)
        while running:  # redis-py swallows a cancellation while it connects: cancel until the task ends
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=0.1)
        self._tasks = []
        if self._owns_link:
            await self.link.close()

    def budget(self) -> StoreBudget:
        return self.link.budget()

    def peek(self, key: SessionKey) -> Binding | Unknown:
        now_s = self._clock()
        entry = self._local.find(key, now_s)
        if entry is None or not self._local.is_trusted(entry, now_s):
            return Unknown.UNKNOWN
        self._num_hits += 1
        return as_binding(entry, entry.expires_at_s + self._wall_offset_s)

    async def get(self, key: SessionKey, budget: StoreBudget | None = None) -> Binding | None:
        now_s = self._clock()
        known = self.peek(key)
        if not isinstance(known, Unknown):
            return known
        self._num_misses += 1
        entry = self._local.find(key, now_s)
        shard = self._layout.shard_of(key)

        async def read() -> Record | None:
            reply = await self.link.run(self._read, [self._layout.session(shard, key)], [])
            if reply == 0 and entry is not None and self._local.find(key, now_s) is entry:
                # Redis has lost a session whose home we have cached (restarted empty, or failed over too
                # early), and we received no message that it ended: claim its old home again.
                reply = await self.link.run(self._claim, self._keys(shard, key), self._same_home(key, entry))
            return self._remember(key, reply, now_s)

        try:
            return self._shown(await self.link.ask(shard, read, budget or self.budget()))
        except Unavailable:
            return self._shown(entry)

    async def claim(
        self,
        key: SessionKey,
        backend_id: BackendId,
        epoch: int,
        context_tokens: int = 0,
        budget: StoreBudget | None = None,
    ) -> Binding | None:
        if not is_storable(backend_id, epoch, context_tokens):
            return None
        shard = self._layout.shard_of(key)
        arguments = [backend_id, epoch, context_tokens, self._ttl_ms, key, 0]

        async def claim() -> Record | None:
            return self._remember(
                key, await self.link.run(self._claim, self._keys(shard, key), arguments), sent_at_s
            )

        sent_at_s = self._clock()
        return await self._write(shard, claim, budget)

    def renew(self, key: SessionKey, binding: Binding, *, context_tokens: int, num_turns: int) -> None:
        # One number that the script cannot parse would make Redis refuse the whole batch again and again.
        context_tokens = min(max(context_tokens, 0), MAX_TOKENS)
        num_turns = min(max(num_turns, 0), MAX_TURNS)
        self._local.renew(
            key,
            binding.version,
            expires_at_s=self._clock() + self._ttl_s,
            context_tokens=context_tokens,
            num_turns=num_turns,
        )
        pending = self._pending[self._layout.shard_of(key)]
        pending.add(key, Renewal(binding.version, context_tokens, num_turns))

    async def rebind(
        self,
        key: SessionKey,
        expected_version: int,
        backend_id: BackendId,
        epoch: int,
        context_tokens: int = 0,
        budget: StoreBudget | None = None,
    ) -> Binding | None:
        if not is_storable(backend_id, epoch, context_tokens):
            return None
        shard = self._layout.shard_of(key)
        arguments = [
            backend_id,
            epoch,
            context_tokens,
            self._ttl_ms,
            key,
            expected_version,
            self._layout.moves_channel,
        ]

        async def rebind() -> Record | None:
            return self._remember(
                key, await self.link.run(self._rebind, self._keys(shard, key), arguments), sent_at_s
            )

        sent_at_s = self._clock()
        return await self._write(shard, rebind, budget)

    async def end(self, key: SessionKey) -> bool:
        shard = self._layout.shard_of(key)
        self._local.drop(key)
        self._pending[shard].discard(key)
        keys = self._keys(shard, key)[:2]

        async def end() -> object:
            return await self.link.run(self._end, keys, [key, self._layout.moves_channel])

        try:
            return await self.link.ask(shard, end, self.budget()) == 1
        except Unavailable:
            return False

    async def list_by_backend(
        self, backend_id: BackendId, *, cursor: str | None = None, limit: int = 100
    ) -> Listing:
        try:
            return await self._listing.page(backend_id, cursor, limit)
        except Unavailable:
            return [], None

    async def count_by_backend(self) -> dict[BackendId, int]:
        try:
            return await self._listing.counts()
        except Unavailable:
            return {}

    def stats(self) -> StoreStats:
        is_live = self._channel.live_since_s is not None
        breaker = self.link.breaker_state
        return StoreStats(
            kind="redis",
            num_sessions=len(self._local),
            is_degraded=self._is_refused or not is_live or breaker is not BreakerState.CLOSED,
            breaker=breaker,
            num_local_hits=self._num_hits,
            num_local_misses=self._num_misses,
            num_evictions=self._local.num_evictions,
            num_pending_renewals=sum(map(len, self._pending)),
            num_dropped_renewals=sum(pending.num_dropped for pending in self._pending),
            num_invalidations=self._channel.num_moves_heard,
            is_invalidation_live=is_live,
            num_calls=self.link.num_calls,
            call_seconds_total=self.link.call_seconds_total,
            errors=dict(self.link.errors),
        )

    async def flush(self) -> None:
        """Send the pending renewals; those that cannot be sent stay pending."""
        for shard, pending in enumerate(self._pending):
            for _ in range(0, len(pending), RENEWALS_PER_CALL):
                if self.link.is_open(shard):
                    break
                batch = pending.take(RENEWALS_PER_CALL)
                if not await self._send(shard, batch):
                    pending.put_back(batch)
                    break

    # --- private ---------------------------------------------------------------------------------

    def _keys(self, shard: int, key: SessionKey) -> list[str]:
        layout = self._layout
        return [layout.session(shard, key), layout.index_prefix(shard), layout.names(shard)]

    def _same_home(self, key: SessionKey, entry: Record) -> list[Any]:
        """Return the arguments of a claim for the entry's home with a newer version."""
        return [entry.backend_id, entry.epoch, entry.context_tokens, self._ttl_ms, key, entry.version + 1]

    def _hear_move(self, key: SessionKey, version: int) -> None:
        self._local.drop_below(key, version, self._clock())

    def _shown(self, record: Record | None) -> Binding | None:
        """Return the caller's view: expiry in wall time, the clock that replicas share."""
        return None if record is None else as_binding(record, record.expires_at_s + self._wall_offset_s)

    def _remember(self, key: SessionKey, reply: object, sent_at_s: float) -> Record | None:
        """Cache a script's reply about a session: its home, or that it has none."""
        record = decode_reply(reply, sent_at_s)
        if record is not None:
            return self._local.put(key, record, sent_at_s)
        self._local.drop(key)
        if reply != 0:
            self.link.errors["odd_value"] += 1
        return None

    async def _write(
        self,
        shard: int,
        operation: Callable[[], Coroutine[Any, Any, Record | None]],
        budget: StoreBudget | None,
    ) -> Binding | None:
        try:
            record = await self.link.ask(shard, operation, budget or self.budget())
        except Unavailable as failure:
            if failure.kind == "refused":
                self._is_refused = True
            return None
        self._is_refused = False
        return self._shown(record)

    async def _send(self, shard: int, batch: list[tuple[SessionKey, Renewal]]) -> bool:
        """Send many renewals in one call. Returns False if they should be sent again."""
        layout = self._layout
        keys = [layout.index_prefix(shard), layout.names(shard), layout.session(shard, SessionKey(""))]
        # One argument per renewal, and a reply only for refused ones: redis-py is slow for each item.
        arguments: list[Any] = [self._ttl_ms]
        arguments += [
            f"{renewal.version} {renewal.context_tokens} {renewal.num_turns} {key}" for key, renewal in batch
        ]
        sent_at_s = self._clock()

        async def send() -> object:
            return await self.link.run(self._renew, keys, arguments)

        try:
            refused = await self.link.ask_patiently(shard, send)
        except Unavailable:
            return False
        for key, renewal in batch:
            self._local.confirm(key, renewal.version, sent_at_s)
        for row in refused if isinstance(refused, list) else []:
            match row:
                case [int() as number, b"", _] if 0 < number <= len(batch):
                    self._local.doubt(batch[number - 1][0], batch[number - 1][1].version)
                case [int() as number, value, ttl_ms] if 0 < number <= len(batch):
                    self._remember(batch[number - 1][0], [value, ttl_ms], sent_at_s)
        return True

    def _set_trust(self, live_since_s: float | None) -> None:
        self._local.trusted_since_s = float("inf") if live_since_s is None else live_since_s
        log_event("session_channel_changed", is_live=live_since_s is not None)

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.flush_interval_ms / 1000)
            try:
                await self.flush()
            except Exception:  # one failed flush must not end all later ones
                logger.exception("session_flush_failed")

    async def _probe_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_interval_ms / 1000)
            self._wall_offset_s = self._wall_clock() - self._clock()  # the wall clock may be set while we run
            await self.link.probe()
