"""What tenants have left of their limits, shared by replicas through Redis.

One script call charges a request against all limits at once, by the server's clock. What is known later (the
tokens really used, the end of a request) is sent in the background by one task that keeps one pending update
per tenant, so under load many ends become one call. A replica's count of requests in flight is a lease that
is renewed while they run, so the places held by a replica that dies are freed when its lease expires.

Redis never sees tenants' names, only hashes of them.
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
from gateway.values import StoreBudget

LEASE_S = 30.0
_CAUSES = ("IN_FLIGHT", "REQUESTS", "TOKENS")  # as the script names them

Arguments = list[str | int]


@dataclass(slots=True)
class _Update:
    """What is still to be sent for one tenant."""

    limits: TenantLimits
    tokens: int = 0  # used beyond what was charged
    sent_s: float = -math.inf  # when its requests in flight were last sent
    is_pending: bool = False


class RedisTenantUse:
    """`limits.tenant_limiter.SharedTenantUse` over the link of the session store."""

    def __init__(self, link: RedisLink, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._link, self._clock = link, clock
        self._replica = uuid.uuid4().hex
        self._sequence = 0
        self._draw_script = load_script(
            "draw", "tenant_use", constants=dict(zip(_CAUSES, REFUSAL_CAUSES, strict=True))
        )
        self._settle_script = load_script("settle", "tenant_use")
        self._num_in_flight_of: Callable[[str], int] = lambda _: 0
        self._updates: dict[str, _Update] = {}  # tenants with something to send or a lease to renew
        self._has_updates = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, num_in_flight_of: Callable[[str], int]) -> None:
        """Start sending; `num_in_flight_of` returns how many requests of a tenant are in flight here."""
        self._num_in_flight_of = num_in_flight_of
        self._task = asyncio.create_task(self._send_forever(), name="tenant-use")

    async def close(self) -> None:
        """Send what is pending, within one second, and stop."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            async with asyncio.timeout(1.0):
                await self._send_all()
        except TimeoutError:
            pass

    async def draw(
        self, tenant: str, limits: TenantLimits, tokens: int, num_in_flight: int, budget: StoreBudget | None
    ) -> Allowance | None:
        shard, key = self._place(tenant)
        arguments = self._arguments(limits, tokens, num_in_flight)

        async def draw() -> object:
            return await self._link.run(self._draw_script, [key], arguments)

        try:
            reply = await self._link.ask(shard, draw, budget or self._link.budget())
        except Unavailable:
            return None
        if limits.max_in_flight is not None:
            self._update(tenant, limits).sent_s = self._clock()
        return self._read(reply, limits, tokens)

    def settle(self, tenant: str, limits: TenantLimits, tokens: int) -> None:
        update = self._update(tenant, limits)
        update.tokens += tokens
        update.is_pending = True
        self._has_updates.set()

    def _update(self, tenant: str, limits: TenantLimits) -> _Update:
        update = self._updates.setdefault(tenant, _Update(limits))
        update.limits = limits
        return update

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
        """Validate the script's reply: Redis may hold anything."""
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
            # the script decides over all replicas; how long to wait is computed here
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

    async def _send_forever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LEASE_S / 3):
                    await self._has_updates.wait()
            except TimeoutError:
                pass  # time to renew the leases
            self._has_updates.clear()
            try:
                await self._send_all()
            except Exception:  # one failed round must not end all later ones
                logging.getLogger(__name__).exception("tenant_ledger_failed")

    async def _send_all(self) -> None:
        """Send pending updates and renew leases. An update that cannot be sent is dropped."""
        due_s = self._clock() - LEASE_S / 3
        for tenant, update in list(self._updates.items()):
            if update.is_pending or update.sent_s <= due_s:
                await self._send(tenant, update)
            holds_lease = update.limits.max_in_flight is not None and self._num_in_flight_of(tenant) > 0
            if not update.is_pending and not holds_lease:
                self._updates.pop(tenant, None)

    async def _send(self, tenant: str, update: _Update) -> None:
        shard, key = self._place(tenant)
        arguments = self._arguments(update.limits, update.tokens, self._num_in_flight_of(tenant))
        update.tokens, update.is_pending, update.sent_s = 0, False, self._clock()

        async def settle() -> object:
            return await self._link.run(self._settle_script, [key], arguments)

        try:
            await self._link.ask_patiently(shard, settle)
        except Unavailable:
            return


def _level(text: bytes, per_minute: int | None) -> float:
    """Parse a level from the script's reply; infinite where there is no limit."""
    return math.inf if per_minute is None else float(text)
