"""Operators' orders: kept here, applied to this replica's fleet, and told to the other replicas.

Every change by the admin API becomes an order with a version (`replicas/order_book.py`). Our own orders and
those of others take the same way: into the book, and from there to the fleet. Each exchange tells the board
what it lacks and reads what others have told it, so an order that was accepted while Redis was away, or that
Redis has lost since, reaches the others as soon as Redis answers.

An order stays with its backend's name: a backend that leaves the fleet and is found again is drained again.
A removed backend is set aside, with its address and key, which are never shared: when an operator adds it
elsewhere, it comes back here too.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import msgspec

from gateway.errors import NotFound
from gateway.fleet.registry import Fleet
from gateway.fleet.settings import FleetSettings
from gateway.observability.logs import log_event
from gateway.replicas.order_book import Order, Orders, Subject, forgettable, merge, next_ms, renew, untold
from gateway.replicas.orders import SharedOrders
from gateway.values import Backend, BackendId, BackendState

MAX_STAMPS = 3
"""How often an order is given a later version because the board had a later one from a faster clock."""


class Operator:
    """Applies orders to one replica's fleet. Its methods raise NotFound for a backend that is not in it.

    They return when the order holds here and the board was told, whether or not it answered: `is_shared`.
    """

    def __init__(
        self,
        fleet: Fleet,
        shared: SharedOrders,
        settings: FleetSettings,
        *,
        named: Callable[[], Collection[str]] = frozenset,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`named` returns the backends that files and sources name, in the fleet or not."""
        self._fleet, self._shared, self._settings = fleet, shared, settings
        self._named, self._wall_clock = named, wall_clock
        self._author = uuid.uuid4().hex
        self._last_ms = 0
        self._book: dict[Subject, Order] = {}
        self._board: Orders = {}  # as last read
        self._obeyed: dict[Subject, tuple[int, str]] = {}  # the version that the fleet shows
        self._set_aside: dict[BackendId, tuple[Backend, str | None]] = {}
        self._exchanging = asyncio.Lock()  # so that `_board` never goes back in time

    def reconfigure(self, settings: FleetSettings) -> None:
        self._settings = settings

    # -- what an operator orders

    async def cordon(self, backend_id: BackendId) -> None:
        await self._accept(self._state(backend_id, wants="cordoned"))

    async def drain(
        self, backend_id: BackendId, deadline_s: float, *, is_until_restart: bool = False
    ) -> None:
        """Drain it until undrained or, with `is_until_restart`, only until its process restarts."""
        epoch = self._known(backend_id).epoch if is_until_restart else None
        deadline_wall_s = self._wall_clock() + deadline_s
        await self._accept(
            self._state(backend_id, wants="draining", deadline_wall_s=deadline_wall_s, epoch=epoch)
        )

    async def undrain(self, backend_id: BackendId) -> None:
        await self._accept(self._state(backend_id, wants=""))

    async def set_weight(self, backend_id: BackendId, weight: float) -> None:
        self._known(backend_id)
        await self._accept(_weight(backend_id, weight))

    async def remove(self, backend_id: BackendId) -> None:
        await self._accept(self._state(backend_id, wants="removed"))

    async def add(self, backend: Backend, *, api_key: str | None = None) -> None:
        """Add or update a backend. It is in the fleet before the first await. A cordon or drain stays."""
        backend_id = backend.backend_id
        self._fleet.add(backend, api_key=api_key)
        state = self._book.get(Subject(backend_id, "state"), Order())
        if state.wants == "removed":
            state = Order()
        again = {
            Subject(backend_id, "state"): msgspec.structs.replace(state, address=_address(backend.base_url))
        }
        await self._accept(again | _weight(backend_id, backend.weight))

    async def yield_to_configuration(self, weights: Mapping[BackendId, float]) -> None:
        """The configuration file has changed these backends: this overrides orders to remove them or to
        change their weight, or a replica that starts later would read the order and differ from the others.
        """
        orders: dict[Subject, Order] = {}
        for backend_id, weight in weights.items():
            state = self._book.get(Subject(backend_id, "state"), Order())
            ordered = self._book.get(Subject(backend_id, "weight"), Order())
            if state.wants == "removed":
                orders |= self._state(backend_id, wants="")
            if ordered.weight not in (None, weight):
                orders |= _weight(backend_id, weight)
        if orders:
            await self._accept(orders)
        for backend_id in weights:
            self.obey(backend_id)

    # -- what holds

    def orders(self) -> Orders:
        """Return the latest order for each subject."""
        return self._book

    def is_shared(self, *subjects: Subject) -> bool:
        """Whether the board had our orders for these subjects when it last answered."""
        ours = {subject: self._book[subject] for subject in subjects if subject in self._book}
        return not untold(ours, self._board)

    def standing(self, backend_id: BackendId) -> list[Subject]:
        """Return the subjects for which there is an order about this backend."""
        both = (Subject(backend_id, "state"), Subject(backend_id, "weight"))
        return [subject for subject in both if subject in self._book]

    def obey(self, backend_id: BackendId) -> None:
        """A backend has come into the fleet, or was changed: apply the orders about it (again)."""
        for subject in self.standing(backend_id):
            self._obeyed.pop(subject, None)
            self._apply(subject)

    async def learn(self) -> None:
        """Exchange orders with the board and apply what is new. Call about once a second."""
        await self._exchange()
        for subject in self._obeyed.keys() - self._book.keys():
            del self._obeyed[subject]
        for subject in sorted(self._book):  # the state first: it may bring back what has the weight
            self._apply(subject)
        away = {subject.backend_id for subject in self._book} - self._fleet.view.backends.keys()
        for backend_id in self._set_aside.keys() - away:
            del self._set_aside[backend_id]

    # --- private ---------------------------------------------------------------------------------

    def _known(self, backend_id: BackendId) -> Backend:
        backend = self._fleet.view.get(backend_id)
        if backend is None:
            raise NotFound(f"no backend {backend_id!r}")
        return backend

    def _state(self, backend_id: BackendId, **fields: object) -> dict[Subject, Order]:
        """An order about the state of a backend. Raises NotFound if it is not in the fleet."""
        address = _address(self._known(backend_id).base_url)
        return {Subject(backend_id, "state"): msgspec.convert({"address": address, **fields}, Order)}

    async def _accept(self, orders: Mapping[Subject, Order]) -> None:
        """Apply these orders with a version of ours, and tell them. What was ordered last holds: if the
        board has a later version that we did not know, its author's clock is ahead, and ours is raised."""
        subjects = tuple(orders)
        for _ in range(MAX_STAMPS):
            now_ms = self._now_ms()
            self._last_ms = next_ms(now_ms, self._last_ms)
            for subject, order in orders.items():
                self._book[subject] = msgspec.structs.replace(
                    order, ms=self._last_ms, author=self._author, renewed_ms=now_ms
                )
                self._apply(subject)
            await self._exchange()
            orders = {
                subject: order
                for subject, order in orders.items()
                if subject in self._book and self._book[subject].author != self._author
            }
            if not orders:
                break
        if not self.is_shared(*subjects):
            backends = sorted({subject.backend_id for subject in subjects})
            log_event("order_not_shared", level=logging.WARNING, backends=backends)

    async def _exchange(self) -> None:
        """Tell the board what it lacked when it last answered; twice, if it turns out to lack more."""
        async with self._exchanging:
            for _ in range(2):
                forgotten, told = self._renew_and_forget(), untold(self._book, self._board)
                board = await self._shared.exchange(
                    told, forgotten, lifetime_s=self._settings.order_lifetime_s
                )
                if board is None:
                    return
                self._board = board
                self._book = merge(self._book, board)
                self._last_ms = max((self._last_ms, *(order.ms for order in board.values())))
                if not untold(self._book, board):
                    return

    def _renew_and_forget(self) -> Orders:
        now_ms, lifetime_ms = self._now_ms(), round(self._settings.order_lifetime_s * 1000)
        in_force = self._in_force()
        forgotten = forgettable(self._book, in_force, now_ms, lifetime_ms)
        kept = {subject: order for subject, order in self._book.items() if subject not in forgotten}
        self._book = renew(kept, in_force, now_ms, lifetime_ms)
        return forgotten

    def _in_force(self) -> set[Subject]:
        backends = self._fleet.view.backends
        away = {subject for subject in self._book if subject.backend_id not in backends}
        if not away:
            return set(self._book)
        named = self._named()
        return {subject for subject in self._book if subject not in away or subject.backend_id in named}

    def _apply(self, subject: Subject) -> None:
        """Bring the fleet to this order, if it does not show it already."""
        backend_id, order = subject.backend_id, self._book[subject]
        if backend_id not in self._fleet.view.backends:
            self._obeyed.pop(subject, None)  # if it comes back, the order is applied again
            if subject.about == "weight" or order.wants == "removed" or not self._bring_back(subject, order):
                return
        if self._obeyed.get(subject) == order.version:
            return
        self._obeyed[subject] = order.version
        if order.weight is not None:
            self._fleet.set_weight(backend_id, order.weight)
        elif order.wants == "removed":
            self._take_out(backend_id)
        elif order.wants == "draining":
            left_s = (order.deadline_wall_s or 0.0) - self._wall_clock()
            self._fleet.drain(backend_id, max(0.0, left_s), epoch=order.epoch)
        elif order.wants == "cordoned":
            self._fleet.cordon(backend_id)
        else:
            self._fleet.undrain(backend_id)

    def _take_out(self, backend_id: BackendId) -> None:
        backend = replace(self._known(backend_id), state=BackendState.JOINING, epoch=0, models=None)
        self._set_aside[backend_id] = backend, self._fleet.api_key(backend_id)
        self._fleet.remove(backend_id)

    def _bring_back(self, subject: Subject, order: Order) -> bool:
        """Add a backend again that was set aside, if that is the one which the order is about."""
        backend, api_key = self._set_aside.get(subject.backend_id, (None, None))
        if backend is None or _address(backend.base_url) != order.address:
            return False
        if any(other.base_url == backend.base_url for other in self._fleet.view.backends.values()):
            return False  # it has another name now
        del self._set_aside[subject.backend_id]
        self._fleet.add(backend, api_key=api_key)
        return True

    def _now_ms(self) -> int:
        return int(self._wall_clock() * 1000)


def _weight(backend_id: BackendId, weight: float) -> dict[Subject, Order]:
    return {Subject(backend_id, "weight"): Order(weight=weight)}


def _address(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:16]
