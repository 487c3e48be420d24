"""The board: where replicas tell each other operators' orders.

One small hash in Redis, exchanged about once a second by each replica and when an admin call orders
something, never on the request path. It holds backend names but no addresses: with an address in it, anyone
who can write to Redis could make the gateway connect there.

Nobody relies on the board to remember: each replica keeps what it knows and tells again what the board
lacks, so a Redis that was emptied, restarted or away is filled again by any replica that was not.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from gateway.redis_link.link import RedisLink, Unavailable
from gateway.redis_link.lua import load_script
from gateway.replicas.order_book import (
    ORDER_RULE,
    Order,
    Orders,
    Subject,
    merge,
    subject_named,
)


class SharedOrders(Protocol):
    """Never raises when Redis fails."""

    async def exchange(self, told: Orders, forgotten: Orders, *, lifetime_s: float) -> Orders | None:
        """Add `told` where the board has nothing later, remove `forgotten` where it has nothing later, and
        return what it has then; None if it did not answer, and it may or may not have done so. Idempotent."""
        ...


class MemoryOrders:
    """A board in memory: of a single process, which has nobody else to tell."""

    def __init__(self) -> None:
        self._board: dict[Subject, Order] = {}

    async def exchange(self, told: Orders, forgotten: Orders, *, lifetime_s: float) -> Orders:
        self._board = merge(self._board, told)
        for subject, order in forgotten.items():
            if subject in self._board and not self._board[subject].is_later(order):
                del self._board[subject]
        return dict(self._board)


class RedisOrders:
    """The board in Redis, over the link of the session store."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._script = load_script("orders", constants=ORDER_RULE)
        self._decode = msgspec.json.Decoder(Order).decode

    async def exchange(self, told: Orders, forgotten: Orders, *, lifetime_s: float) -> Orders | None:
        arguments: list[object] = [round(lifetime_s * 1000), len(told)]
        for subject, order in (*told.items(), *forgotten.items()):
            arguments += [str(subject), msgspec.json.encode(order)]

        async def operation() -> object:
            return await self._link.run(self._script, [self._link.layout.orders], arguments)

        try:
            raw = await self._link.ask_patiently(0, operation)
        except Unavailable:
            return None
        return self._decoded(raw) if isinstance(raw, list) else None

    def _decoded(self, raw: list[bytes]) -> Orders:
        orders: dict[Subject, Order] = {}
        for name, value in zip(raw[::2], raw[1::2], strict=False):
            try:
                orders[subject_named(name.decode())] = self._decode(value)
            except (msgspec.DecodeError, ValueError):
                self._link.errors["odd_value"] += 1
        return orders
