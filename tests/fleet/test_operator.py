"""Operators' orders: what holds after the configuration has said something new."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gateway.fleet.operator import Operator
from gateway.fleet.registry import Fleet
from gateway.replicas.orders import Order
from gateway.routing.health import HealthSettings
from gateway.values import Backend, BackendId

A = BackendId("a")


class ScriptedOrders:
    """What replicas share, without Redis."""

    def __init__(self) -> None:
        self.orders: dict[BackendId, Order] = {}

    async def put(self, backend_id: BackendId, order: Order | None) -> None:
        self.orders.pop(backend_id, None)
        if order is not None:
            self.orders[backend_id] = order

    async def read(self) -> Mapping[BackendId, Order]:
        return dict(self.orders)


def replica(orders: ScriptedOrders, weight: float = 1.0) -> tuple[Operator, Fleet]:
    """One that has just started with this weight in its file."""
    fleet = Fleet(HealthSettings())
    fleet.add(Backend(backend_id=A, base_url="http://a", weight=weight))
    return Operator(fleet, orders), fleet


async def test_a_backend_that_the_file_brings_back_stays() -> None:
    """Removed by hand, then configured anew: a replica that starts later keeps it too."""
    orders = ScriptedOrders()
    operator, fleet = replica(orders)
    await operator.remove(A)
    fleet.add(Backend(backend_id=A, base_url="http://a"))
    await operator.yield_to_configuration(A, 1.0)
    later, fleet_of_later = replica(orders)
    await later.learn()
    assert A in fleet_of_later.view.backends


async def test_a_weight_of_the_file_wins_on_every_replica() -> None:
    """The weight ordered earlier is not found by one that starts later; its cordon is."""
    orders = ScriptedOrders()
    operator, _ = replica(orders)
    await operator.set_weight(A, 5.0)
    await operator.cordon(A)
    await operator.yield_to_configuration(A, 2.0)
    later, fleet = replica(orders, 2.0)
    await later.learn()
    assert fleet.view.backends[A].weight == 2.0
    assert orders.orders[A].wants == "cordoned"


@pytest.mark.parametrize("order", [None, Order(wants="cordoned")])
async def test_other_orders_hold(order: Order | None) -> None:
    """A changed label takes no cordon back, and writes nothing."""
    orders = ScriptedOrders()
    operator, _ = replica(orders)
    if order is not None:
        await operator.cordon(A)
    await operator.yield_to_configuration(A, 2.0)
    assert orders.orders.get(A) == order
