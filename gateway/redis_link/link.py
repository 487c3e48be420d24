"""How long a request waits for Redis, and when it does not ask at all.

A command runs in a task of its own and a request waits for that task within its budget. When the budget is
spent or the client goes away, the request leaves; the command goes on until Redis answers or the socket's
timeout ends it, and what it brings is still used. So no command is ever cancelled half way: no connection
can be left with an unread answer for the next user, and a connection that takes longer to open than the
budget allows (TLS, far away) is opened all the same.

A bounded number of commands is under way (the gate); waiting for a place counts against the budget.
A breaker per shard stops asking what fails repeatedly, and `probe` asks for it in the background.

Invariant: every outcome is an answer or `Unavailable`; no exception of redis-py passes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.observability.logs import log_event
from gateway.redis_link.breaker import Breaker, BreakerState
from gateway.redis_link.client import RedisClients
from gateway.redis_link.key_layout import NUM_CLUSTER_SHARDS, KeyLayout
from gateway.redis_link.lua import Script
from gateway.redis_link.settings import RedisSettings

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

STALL_S = 0.005  # a wait that ends later than this after its time says that the event loop was held up
NUM_WARM_CONNECTIONS = 4  # for each shard, opened at start; more are opened when they are needed


class Unavailable(Exception):
    """Redis gave no usable answer; `kind` is a metrics label from a small fixed set."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class RedisLink:
    """One replica's way to Redis: client, gate, breakers and counters."""

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
        self._gate = asyncio.Semaphore(settings.pool_size)
        self._breakers = [Breaker(settings.breaker_failures) for _ in range(self.layout.num_shards)]
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refusals_logged: set[str] = set()
        self.errors: Counter[str] = Counter()
        self.num_calls = 0
        self.call_seconds_total = 0.0

    @property
    def budget_s(self) -> float:
        return self._settings.budget_ms / 1000

    @property
    def patience_s(self) -> float:
        """How long background work waits: the time after which a silent socket is given up."""
        return self._settings.socket_timeout_ms / 1000

    @property
    def breaker_state(self) -> BreakerState:
        """The worst of all shards."""
        states = {breaker.state for breaker in self._breakers}
        for state in (BreakerState.OPEN, BreakerState.HALF_OPEN):
            if state in states:
                return state
        return BreakerState.CLOSED

    @property
    def num_under_way(self) -> int:
        """Operations that have not ended, those included whose callers have left."""
        return len(self._tasks)

    def is_open(self, shard: int) -> bool:
        """True while this shard is not asked."""
        return not self._breakers[shard].is_closed

    async def ask(
        self, shard: int, operation: Callable[[], Coroutine[Any, Any, Answer]], deadline_s: float
    ) -> Answer:
        """Ask for a request, counted as such: run the operation and wait for it until the deadline. Raises
        Unavailable. Safe to cancel."""
        self.num_calls += not self.is_open(shard)
        started_s = self._clock()
        try:
            return await self._ask(shard, operation, deadline_s)
        finally:
            self.call_seconds_total += self._clock() - started_s

    async def ask_patiently(self, shard: int, operation: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Ask in the background or for the admin: no request waits, so only a silent socket ends it."""
        return await self._ask(shard, operation, self._clock() + self.patience_s)

    async def run(self, script: Script, keys: list[str], arguments: list[Any]) -> Any:
        """Call a script by its digest; send its text if the server does not know it. For operations."""
        try:
            return await self._client.execute_command("EVALSHA", script.sha1, len(keys), *keys, *arguments)
        except NoScriptError:
            return await self._client.execute_command("EVAL", script.text, len(keys), *keys, *arguments)

    async def command(self, *arguments: Any) -> Any:
        """One plain command. For operations."""
        return await self._client.execute_command(*arguments)

    def open_subscriber(self) -> Redis:
        return self._clients.open_subscriber()

    async def warm_up(self) -> None:
        """Open some connections before the first request needs one, because opening may take longer than a
        request's budget. A Redis that is away costs its patience once, and is no error yet."""

        async def touch(shard: int) -> None:
            async with asyncio.timeout(self.patience_s):
                await self._client.execute_command("GET", self.layout.probe(shard))

        shards = [shard for shard in range(self.layout.num_shards) for _ in range(NUM_WARM_CONNECTIONS)]
        await asyncio.gather(*map(touch, shards), return_exceptions=True)

    async def probe(self) -> None:
        """Try each shard that is not asked any more; ask it again if it takes a write within the budget."""
        open_shards = [shard for shard, breaker in enumerate(self._breakers) if breaker.begin_probe()]
        if not open_shards:
            return
        await asyncio.gather(*(self._probe(shard) for shard in open_shards))
        if self.breaker_state is BreakerState.CLOSED:
            log_event("session_store_recovered")

    async def close(self) -> None:
        """End what is under way and close all connections. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()
        await self._clients.aclose()

    # --- private ---------------------------------------------------------------------------------

    async def _ask(
        self, shard: int, operation: Callable[[], Coroutine[Any, Any, Answer]], deadline_s: float
    ) -> Answer:
        if self.is_open(shard):
            raise Unavailable("breaker_open")  # not counted as an error: it costs nothing and is a gauge
        wait_s = deadline_s - self._clock()
        if wait_s <= 0:
            raise self._failed("budget_spent")
        await self._pass_gate(shard, wait_s)
        task = asyncio.create_task(self._supervise(shard, operation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.wait({task}, timeout=max(0.0, deadline_s - self._clock()))
        late_s = self._clock() - deadline_s
        if late_s > STALL_S and not task.done():
            # Our own loop stood still: the answer may have been here all the time.
            await asyncio.wait({task}, timeout=min(late_s, self.budget_s))
        if not task.done():
            self._note_failure(shard)
            raise self._failed("timeout")
        outcome = task.result()
        if isinstance(outcome, Unavailable):
            raise outcome
        return outcome

    async def _pass_gate(self, shard: int, wait_s: float) -> None:
        """Take a place among the commands under way; `_supervise` gives it back."""
        try:
            async with asyncio.timeout(wait_s):
                await self._gate.acquire()
        except TimeoutError:
            self._note_failure(shard)
            raise self._failed("busy") from None

    async def _supervise(
        self, shard: int, operation: Callable[[], Awaitable[Answer]]
    ) -> Answer | Unavailable:
        """The task around one operation: its outcome is a value, never an exception."""
        started_s = self._clock()
        try:
            answer = await operation()
        except ResponseError as error:
            # Redis answered, but said no: full, read-only, no permission. Asking on is cheap and may go well.
            self._log_refusal(error)
            return self._failed("refused")
        except (RedisError, OSError, TimeoutError):
            self._note_failure(shard)
            return self._failed("connection")
        except (
            Exception
        ):  # the supervisor of this task: redis-py meeting nonsense on the wire raises anything
            logger.exception("session_store_unexpected_error")
            self._note_failure(shard)
            return self._failed("unexpected")
        finally:
            self._gate.release()
        if self._clock() - started_s <= self.budget_s:
            self._breakers[shard].note_success()
        return answer

    async def _probe(self, shard: int) -> None:
        write = ("SET", self.layout.probe(shard), "1", "PX", 10_000)
        is_healthy = False
        try:
            async with asyncio.timeout(2 * self.patience_s):
                await self._client.execute_command(*write)  # may have to connect: not what is measured
                started_s = self._clock()
                await self._client.execute_command(*write)
                is_healthy = self._clock() - started_s <= self.budget_s
        except (RedisError, OSError, TimeoutError):
            pass
        except Exception as error:  # as in _supervise
            log_event("session_store_probe_failed", level=logging.DEBUG, reason=repr(error)[:200])
        finally:
            self._breakers[shard].end_probe(is_healthy=is_healthy)

    def _note_failure(self, shard: int) -> None:
        if self._breakers[shard].note_failure():
            log_event("session_store_unavailable", level=logging.WARNING, shard=shard)

    def _log_refusal(self, error: ResponseError) -> None:
        """Once for each kind of refusal (OOM, READONLY, NOPERM, …): it may be on every request."""
        code = str(error).partition(" ")[0][:40]
        if code not in self._refusals_logged and len(self._refusals_logged) < 100:
            self._refusals_logged.add(code)
            log_event("session_store_refused", level=logging.WARNING, reason=str(error)[:200])

    def _failed(self, kind: str) -> Unavailable:
        self.errors[kind] += 1
        return Unavailable(kind)
