"""Operators' orders: what holds after the configuration has said something new."""

from __future__ import annotations

import time

import pytest

from gateway.fleet.operator import Operator
from gateway.fleet.registry import Fleet
from gateway.fleet.settings import FleetSettings
from gateway.replicas.order_book import Subject
from gateway.replicas.orders import MemoryOrders
from gateway.routing.health import HealthSettings
from gateway.values import Backend, BackendId

A = BackendId("a")
STATE, WEIGHT = Subject(A, "state"), Subject(A, "weight")


def replica(board: MemoryOrders, weight: float = 1.0) -> tuple[Operator, Fleet]:
    """One that has just started with this weight in its file."""
    fleet = Fleet(HealthSettings())
    fleet.add(Backend(backend_id=A, base_url="http://a", weight=weight))
    return Operator(fleet, board, FleetSettings()), fleet


async def test_a_backend_that_the_file_brings_back_stays() -> None:
    """Removed by hand, then configured anew: a replica that starts later keeps it too."""
    orders = MemoryOrders()
    operator, fleet = replica(orders)
    await operator.remove(A)
    fleet.add(Backend(backend_id=A, base_url="http://a"))
    await operator.yield_to_configuration({A: 1.0})
    later, fleet_of_later = replica(orders)
    await later.learn()
    assert A in fleet_of_later.view.backends


async def test_a_weight_of_the_file_wins_on_every_replica() -> None:
    """The weight ordered earlier is not found by one that starts later; its cordon is."""
    orders = MemoryOrders()
    operator, _ = replica(orders)
    await operator.set_weight(A, 5.0)
    await operator.cordon(A)
    await operator.yield_to_configuration({A: 2.0})
    later, fleet = replica(orders, 2.0)
    await later.learn()
    assert fleet.view.backends[A].weight == 2.0
    assert later.orders()[STATE].wants == "cordoned"


@pytest.mark.parametrize("is_cordoned", [False, True])
async def test_other_orders_hold(is_cordoned: bool) -> None:
    """A changed label takes no cordon back, and orders nothing."""
    operator, _ = replica(MemoryOrders())
    if is_cordoned:
        await operator.cordon(A)
    before = dict(operator.orders())
    await operator.yield_to_configuration({A: 2.0})
    assert operator.orders() == before


@pytest.mark.parametrize("is_told", [False, True])
async def test_an_order_stays_with_a_backend_that_leaves_and_comes_back(is_told: bool) -> None:
    """As with discovery: drained when found again, though the fleet has forgotten that it ever was."""
    operator, fleet = replica(MemoryOrders())
    await operator.drain(A, 60.0)
    await operator.set_weight(A, 3.0)
    fleet.remove(A)
    if not is_told:
        await operator.learn()
    fleet.add(Backend(backend_id=A, base_url="http://a"))
    if is_told:
        operator.obey(A)
    else:
        await operator.learn()
    assert fleet.drain_left_s(A) is not None
    assert fleet.view.backends[A].weight == 3.0


async def test_adding_a_known_backend_takes_no_drain_back() -> None:
    """POST again, here or elsewhere: it drains on, at every replica, with the weight that was posted."""
    board = MemoryOrders()
    operator, fleet = replica(board)
    other, fleet_of_other = replica(board)
    await operator.drain(A, 60.0)
    await other.learn()
    await other.add(Backend(backend_id=A, base_url="http://a", weight=2.0))
    await operator.learn()
    for each in (fleet, fleet_of_other):
        assert each.drain_left_s(A) is not None
        assert each.view.backends[A].weight == 2.0


async def test_what_was_removed_comes_back_with_its_own_address_only() -> None:
    """Added again elsewhere it is back with its key; under another address it is a backend unknown here."""
    board = MemoryOrders()
    operator, fleet = replica(board)
    other, _ = replica(board)
    fleet.add(Backend(backend_id=A, base_url="http://a"), api_key="secret")
    await operator.remove(A)
    await other.learn()
    await other.add(Backend(backend_id=A, base_url="http://elsewhere"))
    await operator.learn()
    assert A not in fleet.view.backends
    await other.add(Backend(backend_id=A, base_url="http://a"))
    await operator.learn()
    assert fleet.view.backends[A].base_url == "http://a"
    assert fleet.api_key(A) == "secret"


async def test_the_last_order_holds_though_another_clock_is_ahead() -> None:
    """An order of a replica whose clock is an hour ahead is overruled by one that is given after it."""
    board, fleet = MemoryOrders(), Fleet(HealthSettings())
    fleet.add(Backend(backend_id=A, base_url="http://a"))
    ahead = Operator(fleet, board, FleetSettings(), wall_clock=lambda: time.time() + 3600)
    operator, _ = replica(board)
    await ahead.drain(A, 60.0)
    await operator.undrain(A)  # it has not read the board before
    await ahead.learn()
    assert fleet.drain_left_s(A) is None
    assert operator.orders()[STATE] == ahead.orders()[STATE]


async def test_orders_about_what_is_gone_are_forgotten() -> None:
    """H07: by every replica and by the board, after a lifetime; one about a backend that is in the fleet, or
    that a file names, is kept."""
    board, now_s, lifetime_s = MemoryOrders(), [1e9], 1000.0
    b, c = BackendId("b"), BackendId("c")
    operators = []
    for _ in range(2):
        fleet = Fleet(HealthSettings())
        for backend_id in (A, b, c):
            fleet.add(Backend(backend_id=backend_id, base_url=f"http://{backend_id}"))
        operators.append(
            Operator(
                fleet,
                board,
                FleetSettings(order_lifetime_s=lifetime_s),
                named=lambda: {"b"},
                wall_clock=lambda: now_s[0],
            )
        )
    await operators[0].remove(A)
    await operators[0].remove(b)
    await operators[1].learn()
    await operators[1].drain(c, 60.0)
    for _ in range(30):
        now_s[0] += lifetime_s / 10
        for operator in operators:
            await operator.learn()
    known = {Subject(b, "state"), Subject(c, "state")}
    assert [set(operator.orders()) for operator in operators] == [known, known]
    assert (await board.exchange({}, {}, lifetime_s=lifetime_s)).keys() == known
    assert not [operator for operator in operators if A in operator._set_aside]
