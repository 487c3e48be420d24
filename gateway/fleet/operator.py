"""Orders of operators: applied here at once, told to the other replicas, learned from them.

Every change of the admin API goes through `Operator`, so that a drain ordered at one replica holds at all
of them about a second later. A read of the shared board that began before our own last order is thrown
away: it may not know that order yet, and must not take it back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from gateway.fleet.registry import Fleet
from gateway.replicas.orders import Order, SharedOrders
from gateway.values import BackendId, BackendState


class Operator:
    """Carries out orders on one replica's fleet."""

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
        await self._tell(backend_id, Order(wants="cordoned", weight=self._weight(backend_id)))

    async def drain(
        self, backend_id: BackendId, deadline_s: float, *, is_until_restart: bool = False
    ) -> None:
        """Drain it, for good or for this life of its process: who restarts it need not undrain it then."""
        backend = self._fleet.view.get(backend_id)
        epoch = backend.epoch if backend is not None and is_until_restart else None
        self._fleet.drain(backend_id, deadline_s, epoch=epoch)
        deadline_wall_s = self._wall_clock() + deadline_s
        await self._tell(
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
        await self._tell(backend_id, Order(weight=weight) if weight is not None else None)

    async def set_weight(self, backend_id: BackendId, weight: float) -> None:
        self._fleet.set_weight(backend_id, weight)
        before = self._orders.get(backend_id, Order())
        await self._tell(backend_id, msgspec.structs.replace(before, weight=weight))

    async def remove(self, backend_id: BackendId) -> None:
        self._fleet.remove(backend_id)
        await self._tell(backend_id, Order(wants="removed"))

    async def clear_order(self, backend_id: BackendId) -> None:
        """A backend was added: what was ordered for an earlier one of its name is void."""
        await self._tell(backend_id, None)

    async def yield_to_configuration(self, backend_id: BackendId, weight: float) -> None:
        """The file says something new of a backend: its removal is void, and so is another weight.

        Otherwise a replica that starts later would find the order and differ from those that run.
        """
        order = self._orders.get(backend_id)
        if order is not None and order.wants == "removed":
            await self._tell(backend_id, None)
        elif order is not None and order.weight not in (None, weight):
            await self._tell(backend_id, msgspec.structs.replace(order, weight=weight))

    async def learn(self) -> None:
        """Take over what was ordered at other replicas. Call about once a second."""
        asked_s = self._clock()
        orders = await self._shared.read()
        if orders is not None and asked_s > self._ordered_s:
            self._apply(orders)

    async def _tell(self, backend_id: BackendId, order: Order | None) -> None:
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
        """Change what differs from the orders known so far. Unknown backends are somebody else's."""
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
