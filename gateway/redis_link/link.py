"""How a request asks Redis, and when it does not ask at all.

Each command runs in its own task, and a request waits for that task within its budget (`trips.py` says what
counts). When the budget is spent or the client disconnects, the request stops waiting; the command goes on
until Redis answers or has been silent for the socket timeout, and its result is still used. So no command is
cancelled half way: no connection is left with an unread answer for its next user, and a connection that takes
longer to open than the budget (TLS, a distant server) is still opened.

The commands in flight are bounded; the others queue. A breaker per shard stops asking after repeated
failures, and `probe` tests the shard again in the background. A server that says "ask somebody else" is left:
the connections are opened anew.

Invariant: every outcome is an answer or `Unavailable`; no exception of redis-py escapes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.observability.logs import log_event
from gateway.redis_link.breaker import Breaker, BreakerState
from gateway.redis_link.client import RedisClients
from gateway.redis_link.connection import error_code, is_wrong_server
from gateway.redis_link.key_layout import NUM_CLUSTER_SHARDS, KeyLayout
from gateway.redis_link.lua import Script
from gateway.redis_link.settings import RedisSettings
from gateway.redis_link.trips import Trip, Trips, current_trip
from gateway.values import StoreBudget

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

NUM_WARM_CONNECTIONS = 4  # per shard, opened at start; more are opened when needed


class Unavailable(Exception):
    """Redis gave no usable answer; `kind` is a metrics label from a small, fixed set."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class RedisLink:
    """One replica's connection to Redis: client, trips, breakers and counters."""

    def __init__(
        self,
        settings: RedisSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._clients = RedisClients(settings, environ)
        self._client = self._clients.open()
        self.layout = KeyLayout(settings.key_prefix, NUM_CLUSTER_SHARDS if self._clients.is_cluster else 1)
        self._trips = Trips(
            settings.pool_size,
            budget_s=self.budget_s,
            patience_s=self.patience_s,
            start=self._start,
            give_up=self._give_up,
        )
        self._breakers = [Breaker(settings.breaker_failures) for _ in range(self.layout.num_shards)]
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refusals_logged: set[str] = set()
        self._renewed_at_s = -math.inf
        self.errors: Counter[str] = Counter()
        self.num_calls = 0
        self.call_seconds_total = 0.0

    @property
    def budget_s(self) -> float:
        return self._settings.budget_ms / 1000

    @property
    def patience_s(self) -> float:
        """How long background work waits: until the socket timeout."""
        return self._settings.socket_timeout_ms / 1000

    def budget(self) -> StoreBudget:
        """Return what a request that starts now may wait."""
        return StoreBudget(self.budget_s, max(self.budget_s, self.patience_s))

    @property
    def breaker_state(self) -> BreakerState:
        """The worst state of all shards."""
        states = {breaker.state for breaker in self._breakers}
        for state in (BreakerState.OPEN, BreakerState.HALF_OPEN):
            if state in states:
                return state
        return BreakerState.CLOSED

    @property
    def num_under_way(self) -> int:
        """Operations in flight, including those whose callers no longer wait."""
        return len(self._tasks)

    def is_open(self, shard: int) -> bool:
        """Whether the breaker of this shard keeps it from being asked."""
        return not self._breakers[shard].is_closed

    async def ask(
        self, shard: int, operation: Callable[[], Coroutine[Any, Any, Answer]], budget: StoreBudget
    ) -> Answer:
        """Run an operation that a request waits for, within its budget, and count it. Raises Unavailable.
        Safe to cancel."""
        self.num_calls += not self.is_open(shard)
        started_s = self._clock()
        try:
            return await self._ask(shard, operation, budget)
        finally:
            self.call_seconds_total += self._clock() - started_s

    async def ask_patiently(self, shard: int, operation: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Run an operation that no request waits for; only the socket timeout ends it. Raises Unavailable."""
        return await self._ask(shard, operation, StoreBudget(self.patience_s, self.patience_s))

    async def run(self, script: Script, keys: list[str], arguments: list[Any]) -> Any:
        """Call a script by digest, or by its text if the server does not know it. Only inside operations."""
        try:
            return await self._client.execute_command("EVALSHA", script.sha1, len(keys), *keys, *arguments)
        except NoScriptError:
            return await self._client.execute_command("EVAL", script.text, len(keys), *keys, *arguments)

    async def command(self, *arguments: Any) -> Any:
        """Send one plain command. Only inside operations."""
        return await self._client.execute_command(*arguments)

    def open_subscriber(self) -> Redis:
        return self._clients.open_subscriber()

    async def warm_up(self) -> None:
        """Open some connections before the first request needs one, because opening may take longer than a
        request's budget. An unreachable Redis delays the start by one timeout and is not an error."""

        async def touch(shard: int) -> None:
            async with asyncio.timeout(self.patience_s):
                await self._client.execute_command("GET", self.layout.probe(shard))

        shards = [shard for shard in range(self.layout.num_shards) for _ in range(NUM_WARM_CONNECTIONS)]
        await asyncio.gather(*map(touch, shards), return_exceptions=True)

    async def probe(self) -> None:
        """Probe each shard whose breaker is open; close it if the shard accepts a write within the budget."""
        open_shards = [shard for shard, breaker in enumerate(self._breakers) if breaker.begin_probe()]
        if not open_shards:
            return
        await asyncio.gather(*(self._probe(shard) for shard in open_shards))
        if self.breaker_state is BreakerState.CLOSED:
            log_event("session_store_recovered")

    async def close(self) -> None:
        """Cancel what is in flight and close all connections. Idempotent."""
        self._trips.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()
        await self._clients.aclose()

    # --- private ---------------------------------------------------------------------------------

    async def _ask(
        self, shard: int, operation: Callable[[], Coroutine[Any, Any, Answer]], budget: StoreBudget
    ) -> Answer:
        if self.is_open(shard):
            raise Unavailable("breaker_open")  # no error is counted: the breaker has its own gauge
        if budget.is_spent:
            raise self._failed("budget_spent")
        trip = Trip(shard, operation, budget)
        self._trips.enter(trip)
        outcome: Answer | Unavailable = await trip.outcome
        if isinstance(outcome, Unavailable):
            raise outcome
        return outcome

    def _start(self, trip: Trip) -> None:
        task = asyncio.create_task(self._supervise(trip))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _give_up(self, trip: Trip) -> None:
        """The budget is spent. A trip that never had its turn says nothing about Redis, and neither does one
        that took long while Redis was not silent."""
        if self._trips.is_under_way(trip) and trip.budget.is_silence_spent:
            self._note_failure(trip.shard)
            trip.end(self._failed("timeout"))
        else:
            trip.end(self._failed("busy"))

    async def _supervise(self, trip: Trip) -> None:
        """Run one operation in its task. The outcome is a value, never an exception."""
        current_trip.set(trip)
        try:
            answer = await trip.operation()
        except ResponseError as error:
            # An error reply: full, read-only, no permission. Asking again is cheap and may succeed.
            self._note_refusal(error)
            trip.end(self._failed("refused"))
        except (RedisError, OSError, TimeoutError) as error:
            if isinstance(error, RedisError) and is_wrong_server(error):
                self._leave_server(error)
            self._note_failure(trip.shard)
            trip.end(self._failed("connection"))
        except Exception:  # task supervisor: on malformed replies redis-py may raise anything
            logger.exception("session_store_unexpected_error")
            self._note_failure(trip.shard)
            trip.end(self._failed("unexpected"))
        else:
            if trip.silent_s < self.budget_s:
                self._breakers[trip.shard].note_success()
            trip.end(answer)
        finally:
            self._trips.leave(trip)

    async def _probe(self, shard: int) -> None:
        write = ("SET", self.layout.probe(shard), "1", "PX", 10_000)

        async def write_twice() -> None:
            await self._client.execute_command(*write)  # may have to connect first, which is not measured
            trip.silent_s = 0.0
            await self._client.execute_command(*write)

        is_healthy = False
        trip = Trip(shard, write_twice, StoreBudget(math.inf, math.inf))
        current_trip.set(trip)
        self._trips.watch(trip)
        try:
            async with asyncio.timeout(2 * self.patience_s):
                await write_twice()
            is_healthy = trip.silent_s < self.budget_s
        except (RedisError, OSError, TimeoutError):
            pass
        except Exception as error:  # as in _supervise
            log_event("session_store_probe_failed", level=logging.DEBUG, reason=repr(error)[:200])
        finally:
            self._trips.leave(trip)
            self._breakers[shard].end_probe(is_healthy=is_healthy)

    def _note_failure(self, shard: int) -> None:
        if self._breakers[shard].note_failure():
            log_event("session_store_unavailable", level=logging.WARNING, shard=shard)
            self._trips.send_away(shard, Unavailable("breaker_open"))

    def _note_refusal(self, error: ResponseError) -> None:
        """Leave a wrong server. Log any other kind of refusal (OOM, NOPERM, …) once: it may happen on every
        request."""
        if is_wrong_server(error):
            self._leave_server(error)
            return
        code = error_code(error)
        if code not in self._refusals_logged and len(self._refusals_logged) < 100:
            self._refusals_logged.add(code)
            log_event("session_store_refused", level=logging.WARNING, reason=f"{code} {error}"[:200])

    def _leave_server(self, error: RedisError) -> None:
        """Open the connections anew, once per heartbeat: the name may lead to the same server for a while."""
        now_s = self._clock()
        if now_s - self._renewed_at_s < self._settings.heartbeat_interval_ms / 1000:
            return
        self._renewed_at_s = now_s
        self._clients.renew()
        log_event(
            "session_store_wrong_server",
            level=logging.WARNING,
            reason=f"{error_code(error)} {error}"[:200],
        )

    def _failed(self, kind: str) -> Unavailable:
        self.errors[kind] += 1
        return Unavailable(kind)
