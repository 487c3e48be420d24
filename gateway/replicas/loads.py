"""Replicas telling each other how much work they have sent out, so that they do not all choose the same
idle backend at once.

Each replica writes one field of one hash, about once a second and never on the request path, and reads the
fields of the others in the same call. What a replica wrote is void after three seconds, on the server's
clock to readers and on our own to us: with Redis away the others count as idle, and each replica goes on
with what it knows itself.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Protocol

import msgspec

from gateway.redis_link.link import RedisLink, Unavailable
from gateway.redis_link.lua import load_script
from gateway.values import BackendId

LIFETIME_S = 3.0

Load = dict[BackendId, tuple[float, int]]
"""Per backend: seconds of prefill work sent and not yet answered, and requests in flight."""


class SharedLoads(Protocol):
    """Never raises for trouble with the store."""

    async def publish(self, work: Load) -> None:
        """Write this replica's load and read that of the others. Call about once a second."""
        ...

    def others(self) -> Load:
        """The sums over all other replicas, as last read; empty when that is too long ago. Costs no I/O."""
        ...


class MemoryLoads:
    """One process is all there is: the others have no load."""

    async def publish(self, work: Load) -> None:
        """Nobody to tell."""

    def others(self) -> Load:
        return {}


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """One backend of one replica's payload; a payload is a JSON list of them."""

    backend_id: str
    work_s: float
    num_in_flight: int


class RedisLoads:
    """The board in Redis, over the store's link."""

    def __init__(self, link: RedisLink, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._replica = uuid.uuid4().hex
        self._script = load_script("loads")
        self._decoder = msgspec.json.Decoder(list[_Row])
        self._others: Load = {}
        self._read_at_s = -LIFETIME_S

    async def publish(self, work: Load) -> None:
        rows = [_Row(backend_id, work_s, number) for backend_id, (work_s, number) in work.items()]
        arguments = [self._replica, msgspec.json.encode(rows), round(LIFETIME_S * 1000)]

        async def exchange() -> object:
            return await self._link.run(self._script, [self._link.layout.loads], arguments)

        asked_at_s = self._clock()
        try:
            payloads = await self._link.ask_patiently(0, exchange)
        except Unavailable:
            return
        if isinstance(payloads, list):
            self._others = self._sum(payloads)
            self._read_at_s = asked_at_s

    def others(self) -> Load:
        if self._clock() - self._read_at_s >= LIFETIME_S:
            return {}
        return self._others

    def _sum(self, payloads: list[object]) -> Load:
        """Add up what is well formed; a replica that writes nonsense counts as idle."""
        total: Load = {}
        for payload in payloads:
            try:
                rows = self._decoder.decode(payload) if isinstance(payload, bytes) else []
            except msgspec.DecodeError:
                self._link.errors["odd_value"] += 1
                continue
            for row in rows:
                if 0 <= row.work_s < 1e9 and 0 <= row.num_in_flight < 10**9:
                    work_s, number = total.get(BackendId(row.backend_id), (0.0, 0))
                    total[BackendId(row.backend_id)] = (work_s + row.work_s, number + row.num_in_flight)
        return total
