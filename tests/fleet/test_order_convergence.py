"""Operators' orders under faults: replicas that were cut off, frozen, emptied and restarted agree in the end.

The board is a fake with the faults of Redis: a replica may be cut off from it; while it is frozen, commands
time out and are carried out later, in any order, or never; it is emptied; an answer is lost. Replicas restart
and remember nothing. After the faults all have the latest order that a living replica or the board still
knew, and their fleets show it.
"""

from __future__ import annotations

import functools
from collections.abc import Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gateway.fleet.operator import Operator
from gateway.fleet.registry import Fleet
from gateway.fleet.settings import FleetSettings
from gateway.replicas.order_book import Order, Orders, Subject
from gateway.replicas.orders import MemoryOrders
from gateway.routing.health import HealthSettings
from gateway.values import Backend, BackendId

BACKENDS = [BackendId(name) for name in ("a", "b")]
NUM_REPLICAS = 3
ROUNDS_TO_AGREE = 2
replicas, backends = st.integers(0, NUM_REPLICAS - 1), st.sampled_from(BACKENDS)


class Line:
    """One replica's connection to the board."""

    def __init__(self, board: FaultyBoard) -> None:
        self._board = board
        self.is_cut = self.loses_answers = False

    async def exchange(self, told: Orders, forgotten: Orders, *, lifetime_s: float) -> Orders | None:
        if self.is_cut:
            return None
        command = functools.partial(self._board.orders.exchange, told, forgotten, lifetime_s=lifetime_s)
        if self._board.is_frozen:
            self._board.late.append(command)
            return None
        answer = await command()
        return None if self.loses_answers else answer


class FaultyBoard:
    def __init__(self) -> None:
        self.orders = MemoryOrders()
        self.is_frozen = False
        self.late: list[functools.partial[Coroutine[Any, Any, Orders]]] = []


class Replica:
    """A replica whose file names all backends."""

    def __init__(self, line: Line, machine: Orders3, skew_s: float) -> None:
        self.line, self.fleet = line, Fleet(HealthSettings())
        for backend_id in BACKENDS:
            self.fleet.add(described(backend_id))
        self.operator = Operator(
            self.fleet,
            line,
            FleetSettings(),
            named=lambda: BACKENDS,
            wall_clock=lambda: machine.now_s + skew_s,
        )

    def shows(self, backend_id: BackendId) -> tuple[str, float | None]:
        """What the fleet does with a backend, in an order's words, and its weight."""
        backend = self.fleet.view.get(backend_id)
        if backend is None:
            return "removed", None
        row = self.fleet._rows[backend_id]  # the state in the view may be hidden by health
        return row.wants.value if row.wants else "", backend.weight


def described(backend_id: BackendId, weight: float = 1.0) -> Backend:
    return Backend(backend_id=backend_id, base_url=f"http://{backend_id}", weight=weight)


class Orders3(RuleBasedStateMachine):
    """Three replicas and a board."""

    @initialize(skews=st.sampled_from([(0.0, 0.0, 0.0), (0.0, 5.0, -5.0)]))
    def begin(self, skews: tuple[float, ...]) -> None:
        self.now_s, self.num_accepted = 1e9, 0
        self.accepted: dict[tuple[int, str], int] = {}  # version -> the how manieth
        self.skews, self.board = skews, FaultyBoard()
        self.replicas = [Replica(Line(self.board), self, skew) for skew in skews]

    # -- orders

    @rule(
        at=replicas,
        backend_id=backends,
        what=st.sampled_from(["cordon", "drain", "undrain", "remove", "weight"]),
    )
    def order(self, at: int, backend_id: BackendId, what: str) -> None:
        replica = self.replicas[at]
        if backend_id not in replica.fleet.view.backends:
            return
        operator = replica.operator
        match what:
            case "drain":
                self._accept(at, operator.drain(backend_id, 60.0))
            case "weight":
                self._accept(at, operator.set_weight(backend_id, float(self.num_accepted % 1000)))
            case _:
                self._accept(at, getattr(operator, what)(backend_id))

    @rule(at=replicas, backend_id=backends)
    def add(self, at: int, backend_id: BackendId) -> None:
        weight = float(self.num_accepted % 1000)
        self._accept(at, self.replicas[at].operator.add(described(backend_id, weight)))
        assert self.replicas[at].fleet.view.backends[backend_id].weight == weight

    def _accept(self, at: int, order: Coroutine[Any, Any, None]) -> None:
        """Note the versions that it brought. Each is later than all that this replica knew."""
        book = self.replicas[at].operator
        known = {subject: order.version for subject, order in book.orders().items()}
        self.now_s += 0.001
        self.num_accepted += 1
        run(order)
        for subject, new in book.orders().items():
            if new.version not in self.accepted:
                assert subject not in known or new.version > known[subject]
                self.accepted[new.version] = self.num_accepted

    # -- what goes on meanwhile

    @rule(at=replicas)
    def exchange(self, at: int) -> None:
        run(self.replicas[at].operator.learn())

    @rule(at=replicas, is_cut=st.booleans(), loses_answers=st.booleans())
    def cut(self, at: int, is_cut: bool, loses_answers: bool) -> None:
        self.replicas[at].line.is_cut, self.replicas[at].line.loses_answers = is_cut, loses_answers

    @rule(is_frozen=st.booleans())
    def freeze(self, is_frozen: bool) -> None:
        self.board.is_frozen = is_frozen

    @precondition(lambda self: self.board.late)
    @rule(data=st.data(), is_lost=st.booleans())
    def late(self, data: st.DataObject, is_lost: bool) -> None:
        command = self.board.late.pop(data.draw(st.integers(0, len(self.board.late) - 1)))
        if not is_lost:
            run(command())

    @rule()
    def flush(self) -> None:
        self.board.orders = MemoryOrders()

    @rule(at=replicas)
    def restart(self, at: int) -> None:
        self.replicas[at] = Replica(Line(self.board), self, self.skews[at])

    # -- the end of the faults

    @rule()
    def agree(self) -> None:
        self.board.is_frozen = False
        self.board.late.clear()
        for replica in self.replicas:
            replica.line.is_cut = replica.line.loses_answers = False
        expected = self._latest_known()
        for _ in range(ROUNDS_TO_AGREE):
            for replica in self.replicas:
                run(replica.operator.learn())
        for replica in self.replicas:
            assert {key: order.version for key, order in replica.operator.orders().items()} == {
                key: order.version for key, order in expected.items()
            }
            for backend_id in BACKENDS:
                wants = expected.get(Subject(backend_id, "state"), Order()).wants
                weight = expected.get(Subject(backend_id, "weight"), Order()).weight
                shown, shown_weight = replica.shows(backend_id)
                assert shown == wants
                assert wants == "removed" or shown_weight == (1.0 if weight is None else weight)

    def _latest_known(self) -> Orders:
        """With equal clocks, the one that was accepted last; else the one of the latest version."""
        books = [replica.operator.orders() for replica in self.replicas]
        books.append(run(self.board.orders.exchange({}, {}, lifetime_s=1.0)))
        known: dict[Subject, list[Order]] = {}
        for book in books:
            for subject, order in book.items():
                known.setdefault(subject, []).append(order)
        are_equal = len(set(self.skews)) == 1
        return {
            subject: max(
                orders, key=lambda order: (self.accepted[order.version] if are_equal else 0, order.version)
            )
            for subject, orders in known.items()
        }

    def teardown(self) -> None:
        if hasattr(self, "board"):
            self.agree()


def run(step: Coroutine[Any, Any, Any]) -> Any:
    """Run to its end what never waits, because the board answers at once. No event loop is needed."""
    try:
        step.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


TestOrdersConverge = Orders3.TestCase
TestOrdersConverge.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
