"""Operators' orders for backends (cordon, drain, weight, removal), shared by all replicas.

One small hash, read about once a second by each replica and written when an admin call changes something,
never on the request path. It holds backend names but no addresses: with an address in it, anyone who can
write to Redis could make the gateway connect there. While Redis is unavailable every replica keeps the orders
it last read, and a new order holds only on the replica that received it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from gateway.redis_link.link import RedisLink, Unavailable
from gateway.values import BackendId


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The order for one backend. Values from Redis are validated when read."""

    wants: Literal["", "cordoned", "draining", "removed"] = ""
    deadline_wall_s: float | None = None  # of a drain, in wall time: the only clock that replicas share
    epoch: int | None = None  # of a drain that ends when the backend restarts
    weight: float | None = None


class SharedOrders(Protocol):
    """Never raises when Redis fails."""

    async def put(self, backend_id: BackendId, order: Order | None) -> None:
        """Publish an order to the others; `None` deletes it."""
        ...

    async def read(self) -> Mapping[BackendId, Order] | None:
        """Return all orders, or `None` if they cannot be read now."""
        ...


class MemoryOrders:
    """A single process: nothing to publish, nothing to read."""

    async def put(self, backend_id: BackendId, order: Order | None) -> None:
        """Do nothing."""

    async def read(self) -> Mapping[BackendId, Order] | None:
        return None


class RedisOrders:
    """Orders in Redis, over the link of the session store."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._decode = msgspec.json.Decoder(Order).decode

    async def put(self, backend_id: BackendId, order: Order | None) -> None:
        key = self._link.layout.orders
        if order is None:
            await self._ask("HDEL", key, backend_id)
        else:
            await self._ask("HSET", key, backend_id, msgspec.json.encode(order))

    async def read(self) -> Mapping[BackendId, Order] | None:
        raw = await self._ask("HGETALL", self._link.layout.orders)
        if not isinstance(raw, dict | list):
            return None
        pairs = raw.items() if isinstance(raw, dict) else zip(raw[::2], raw[1::2], strict=False)
        orders: dict[BackendId, Order] = {}
        for name, value in pairs:
            try:
                orders[BackendId(name.decode())] = self._decode(value)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._link.errors["odd_value"] += 1
        return orders

    async def _ask(self, *command: object) -> object:
        async def operation() -> object:
            return await self._link.command(*command)

        try:
            return await self._link.ask_patiently(0, operation)
        except Unavailable:
            return None
