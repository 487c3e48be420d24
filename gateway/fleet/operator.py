"""Operators' orders: applied here at once, published to the other replicas, and read from them.

Every change by the admin API goes through `Operator`, so a drain ordered at one replica holds at all of them
about a second later. A read of the shared orders that began before our own last order is discarded: it may
not contain that order and must not undo it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from gateway.fleet.registry import Fleet
from gateway.replicas.orders import Order, SharedOrders
from gateway.values import BackendId, BackendState


class Operator:
    """Applies orders to one replica's fleet."""

    def __init__(
        self,
        fleet: Fleet,
        shared: SharedOrders,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._fleet, self._shared = fleet, shared
        self._clock, self._wall_clock = clock, wall_clock
        self._orders: dict[BackendId, Order] = {}
        self._ordered_s = 0.0

    async def cordon(self, backend_id: BackendId) -> None:
        self._fleet.cordon(backend_id)
        await self._publish(backend_id, Order(wants="cordoned", weight=self._weight(backend_id)))

    async def drain(
        self, backend_id: BackendId, deadline_s: float, *, is_until_restart: bool = False
    ) -> None:
        """Drain it until undrained or, with `is_until_restart`, only until its process restarts."""
        backend = self._fleet.view.get(backend_id)
        epoch = backend.epoch if backend is not None and is_until_restart else None
        self._fleet.drain(backend_id, deadline_s, epoch=epoch)
        deadline_wall_s = self._wall_clock() + deadline_s
        await self._publish(
            backend_id,
            Order(
                wants="draining",
                deadline_wall_s=deadline_wall_s,
                epoch=epoch,
                weight=self._weight(backend_id),
            ),
        )

    async def undrain(self, backend_id: BackendId) -> None:
        self._fleet.undrain(backend_id)
        weight = self._weight(backend_id)
        await self._publish(backend_id, Order(weight=weight) if weight is not None else None)

    async def set_weight(self, backend_id: BackendId, weight: float) -> None:
        self._fleet.set_weight(backend_id, weight)
        before = self._orders.get(backend_id, Order())
        await self._publish(backend_id, msgspec.structs.replace(before, weight=weight))

    async def remove(self, backend_id: BackendId) -> None:
        self._fleet.remove(backend_id)
        await self._publish(backend_id, Order(wants="removed"))

    async def clear_order(self, backend_id: BackendId) -> None:
        """A backend was added: delete any order for an earlier one with its name."""
        await self._publish(backend_id, None)

    async def yield_to_configuration(self, backend_id: BackendId, weight: float) -> None:
        """The configuration file has changed a backend: this overrides an order to remove it or to change
        its weight. Otherwise a replica that starts later would read the order and differ from the others.
        """
        order = self._orders.get(backend_id)
        if order is not None and order.wants == "removed":
            await self._publish(backend_id, None)
        elif order is not None and order.weight not in (None, weight):
            await self._publish(backend_id, msgspec.structs.replace(order, weight=weight))

    async def learn(self) -> None:
        """Apply the orders given at other replicas. Call about once a second."""
        asked_s = self._clock()
        orders = await self._shared.read()
        if orders is not None and asked_s > self._ordered_s:
            self._apply(orders)

    async def _publish(self, backend_id: BackendId, order: Order | None) -> None:
        self._ordered_s = self._clock()
        if order is None:
            self._orders.pop(backend_id, None)
        else:
            self._orders[backend_id] = order
        await self._shared.put(backend_id, order)
        self._ordered_s = self._clock()

    def _weight(self, backend_id: BackendId) -> float | None:
        return self._orders.get(backend_id, Order()).weight

    def _apply(self, orders: Mapping[BackendId, Order]) -> None:
        """Apply what differs from the orders known so far. Orders for unknown backends are ignored."""
        for backend_id in orders.keys() | self._orders.keys():
            order = orders.get(backend_id, Order())
            before = self._orders.get(backend_id, Order())
            if order == before or backend_id not in self._fleet.view.backends:
                continue
            if order.wants == "removed":
                self._fleet.remove(backend_id)
                continue
            if order.weight is not None and 0 <= order.weight <= 1000:
                self._fleet.set_weight(backend_id, order.weight)
            if order.wants == BackendState.DRAINING.value:
                left_s = (order.deadline_wall_s or self._wall_clock()) - self._wall_clock()
                self._fleet.drain(backend_id, max(0.0, left_s), epoch=order.epoch)
            elif order.wants == BackendState.CORDONED.value:
                self._fleet.cordon(backend_id)
            elif before.wants:
                self._fleet.undrain(backend_id)
        self._orders = dict(orders)
