"""What tenants have left of their limits, shared by replicas through Redis.

One script call charges a request over all limits at once, on the server's clock. What is learnt later (the
tokens really used, the end of a request) is sent in the background by one task, the latest word per tenant:
under load many ends become one call. A replica's requests in flight are leased and announced again while
they last, so a replica that dies gives its tenants' places back by itself.

Tenants' names never reach Redis: a hash of the name does.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from gateway.limits.allowance import REFUSAL_CAUSES, Allowance, judge
from gateway.limits.settings import TenantLimits
from gateway.redis_link.link import RedisLink, Unavailable
from gateway.redis_link.lua import load_script

LEASE_S = 30.0

Arguments = list[str | int]


@dataclass(slots=True)
class _Word:
    """What is to be told of one tenant."""

    limits: TenantLimits
    tokens: int = 0  # more than charged
    told_s: float = -math.inf  # when its requests in flight were last told
    is_news: bool = False


class RedisTenantUse:
    """`limits.tenant_limiter.SharedTenantUse` over the session store's link."""

    def __init__(self, link: RedisLink, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._link, self._clock = link, clock
        self._replica = uuid.uuid4().hex
        self._sequence = 0
        self._draw_script = load_script("draw", "tenant_use")
        self._settle_script = load_script("settle", "tenant_use")
        self._num_in_flight_of: Callable[[str], int] = lambda _: 0
        self._words: dict[str, _Word] = {}  # tenants with news, or with requests to announce again
        self._has_news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, num_in_flight_of: Callable[[str], int]) -> None:
        """Begin to tell; `num_in_flight_of` a tenant says how many requests are under way here."""
        self._num_in_flight_of = num_in_flight_of
        self._task = asyncio.create_task(self._tell_for_ever(), name="tenant-ledger")

    async def close(self) -> None:
        """Send what is left to tell, within a second, and end."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(1.0):
                await self._tell_all()
        except TimeoutError:
            pass

    async def draw(
        self, tenant: str, limits: TenantLimits, tokens: int, num_in_flight: int, deadline_s: float
    ) -> Allowance | None:
        shard, key = self._place(tenant)
        arguments = self._arguments(limits, tokens, num_in_flight)

        async def draw() -> object:
            return await self._link.run(self._draw_script, [key], arguments)

        try:
            reply = await self._link.ask(shard, draw, deadline_s)
        except Unavailable:
            return None
        if limits.max_in_flight is not None:
            self._word(tenant, limits).told_s = self._clock()
        return self._read(reply, limits, tokens)

    def settle(self, tenant: str, limits: TenantLimits, tokens: int) -> None:
        word = self._word(tenant, limits)
        word.tokens += tokens
        word.is_news = True
        self._has_news.set()

    def _word(self, tenant: str, limits: TenantLimits) -> _Word:
        word = self._words.setdefault(tenant, _Word(limits))
        word.limits = limits
        return word

    def _place(self, tenant: str) -> tuple[int, str]:
        name = blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        shard = self._link.layout.shard_of(name)
        return shard, self._link.layout.tenant(shard, name)

    def _arguments(self, limits: TenantLimits, tokens: int, num_in_flight: int) -> Arguments:
        self._sequence += 1
        return [
            limits.max_in_flight or 0,
            limits.requests_per_minute or 0,
            limits.tokens_per_minute or 0,
            tokens,
            self._replica,
            self._sequence,
            num_in_flight,
            round(LEASE_S * 1000),
        ]

    def _read(self, reply: object, limits: TenantLimits, tokens: int) -> Allowance | None:
        """Check what the script says: Redis may hold anything."""
        match reply:
            case [bytes() as cause, bytes() as requests_left, bytes() as tokens_left]:
                pass
            case _:
                self._link.errors["odd_value"] += 1
                return None
        refused_for = cause.decode("latin-1") or None
        left = (
            _level(requests_left, limits.requests_per_minute),
            _level(tokens_left, limits.tokens_per_minute),
        )
        retry_after_s = 0.0
        if refused_for is not None:
            # the script knows the replicas, this rule knows how long to wait
            num_in_flight = (limits.max_in_flight or 0) if refused_for == REFUSAL_CAUSES[0] else 0
            judged = judge(
                limits, requests_left=left[0], tokens_left=left[1], num_in_flight=num_in_flight, tokens=tokens
            )
            retry_after_s = judged[1]
        return Allowance(
            refused_for=refused_for,
            retry_after_s=retry_after_s,
            requests_left=left[0],
            tokens_left=left[1],
        )

    # -- in the background

    async def _tell_for_ever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LEASE_S / 3):
                    await self._has_news.wait()
            except TimeoutError:
                pass  # time to announce again what is under way
            self._has_news.clear()
            try:
                await self._tell_all()
            except Exception:  # supervisor: one bad round must not end all later ones
                logging.getLogger(__name__).exception("tenant_ledger_failed")

    async def _tell_all(self) -> None:
        """Tell what is new and what has not been told for long. With Redis away it is forgotten."""
        due_s = self._clock() - LEASE_S / 3
        for tenant, word in list(self._words.items()):
            if word.is_news or word.told_s <= due_s:
                await self._tell(tenant, word)
            must_go_on = word.limits.max_in_flight is not None and self._num_in_flight_of(tenant) > 0
            if not word.is_news and not must_go_on:
                self._words.pop(tenant, None)

    async def _tell(self, tenant: str, word: _Word) -> None:
        shard, key = self._place(tenant)
        arguments = self._arguments(word.limits, word.tokens, self._num_in_flight_of(tenant))
        word.tokens, word.is_news, word.told_s = 0, False, self._clock()

        async def settle() -> object:
            return await self._link.run(self._settle_script, [key], arguments)

        try:
            await self._link.ask_patiently(shard, settle)
        except Unavailable:
            return


def _level(text: bytes, per_minute: int | None) -> float:
    """Return a level that the script wrote; one without a limit has no end."""
    return math.inf if per_minute is None else float(text)
