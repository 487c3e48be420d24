"""The load that each replica has sent out, shared so that not all replicas choose the same idle backend.

Each replica writes one field of one hash, about once a second and never on the request path, and reads the
fields of the others in the same call. A field expires after three seconds, by the server's clock for its
readers and by our own clock for what we have read. While Redis is unavailable the others count as idle and
each replica decides with what it knows itself.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Protocol

import msgspec

from gateway.redis_link.link import RedisLink, Unavailable
from gateway.redis_link.lua import load_script
from gateway.values import BackendId, Name

LIFETIME_S = 3.0

Load = dict[BackendId, tuple[float, int]]
"""Per backend: seconds of prefill work sent but not yet answered, and requests in flight."""


class SharedLoads(Protocol):
    """Never raises when Redis fails."""

    async def publish(self, work: Load) -> None:
        """Write this replica's load and read that of the others. Call about once a second."""
        ...

    def others(self) -> Load:
        """Return the sums over all other replicas as last read, or nothing if that is too old. No I/O."""
        ...


class MemoryLoads:
    """A single process: there are no others."""

    async def publish(self, work: Load) -> None:
        """Do nothing."""

    def others(self) -> Load:
        return {}


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """One backend of one replica's payload; a payload is a JSON list of them."""

    backend_id: Name
    work_s: float
    num_in_flight: int


class RedisLoads:
    """Loads in Redis, over the link of the session store."""

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
        """Add up the well-formed payloads; a replica whose payload is malformed counts as idle."""
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
