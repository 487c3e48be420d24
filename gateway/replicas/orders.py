"""What operators asked of backends (cordon, drain, weight, removal), shared by all replicas.

One small hash, read about once a second by each replica and written when an admin call changes something,
never on the request path. It holds names and wishes, no addresses: an address from a shared store would be
an address that anyone who can write there makes us dial. With Redis away every replica keeps what it last
knew, and an order given meanwhile holds on the replica that took it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from gateway.redis_link.link import RedisLink, Unavailable
from gateway.values import BackendId


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is wished for one backend. Values from Redis are validated on the way in."""

    wants: Literal["", "cordoned", "draining", "removed"] = ""
    deadline_wall_s: float | None = None  # of a drain, on the wall clock: replicas share no other
    epoch: int | None = None  # of a drain that is for one life of the backend only
    weight: float | None = None


class SharedOrders(Protocol):
    """Never raises for trouble with the store."""

    async def put(self, backend_id: BackendId, order: Order | None) -> None:
        """Tell the others; `None` takes all wishes back."""
        ...

    async def read(self) -> Mapping[BackendId, Order] | None:
        """All orders; `None` when they cannot be known now."""
        ...


class MemoryOrders:
    """One process is all there is: nothing to tell, nothing to learn."""

    async def put(self, backend_id: BackendId, order: Order | None) -> None:
        """Nobody to tell."""

    async def read(self) -> Mapping[BackendId, Order] | None:
        return None


class RedisOrders:
    """The orders in Redis, over the store's link."""

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
