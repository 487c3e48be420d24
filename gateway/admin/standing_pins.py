"""Fleet-wide pins: adds them to backends that join later or come back without them.

A pin order for all backends is a standing order. This replica keeps it, with the prompt text, in memory until
it is removed, expires, or the replica stops. Each epoch of each backend gets the pins that it lacks, once; a
pin that an operator or the engine removes afterwards is not added again. If a backend refuses or fails, it is
retried a few times with growing pauses, then left alone until its next epoch.

Invariant: nothing is pinned twice, because the engine's own list is read first. Orders for named backends are
not kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from gateway.admin.answers import MissingPin, Pin
from gateway.admin.engine_pins import ENGINES_WITH_PINS, EnginePins
from gateway.admin.orders import PinOrder
from gateway.errors import BadRequest, Conflict, GatewayError
from gateway.fleet.registry import Fleet
from gateway.observability.logs import log_event
from gateway.values import Backend, BackendId

LOOK_S = 1.0
FIRST_PAUSE_S = 2.0
MAX_TRIES = 6
"""Pauses double, so this is about a minute."""
MAX_ORDERS = 64
MAX_ORDER_BYTES = 1024 * 1024
"""Limit of one standing order: enough for a system prompt with its tools."""

PinKey = tuple[str, str]
"""Name and owner, which identify a pin on an engine."""
OrderEncoder = Callable[[PinOrder], bytes]


@dataclass(slots=True)
class _Standing:
    order: PinOrder
    expires_s: float | None


@dataclass(slots=True)
class _Tries:
    """The attempts to apply one order to one epoch of one backend."""

    num_tries: int = 0
    next_s: float = 0.0
    problem: str | None = None
    is_done: bool = False

    @property
    def is_given_up(self) -> bool:
        return self.num_tries >= MAX_TRIES


def key_of(order: PinOrder) -> PinKey:
    return order.name, order.tenant or ""


class StandingPins:
    """The standing orders, and the background task that applies them (`running`)."""

    def __init__(
        self,
        fleet: Fleet,
        engines: EnginePins,
        encode: OrderEncoder,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`encode` turns an order into the engine's request, or raises BadRequest if it is not valid now."""
        self._fleet, self._engines, self._encode, self._clock = fleet, engines, encode, clock
        self._orders: dict[PinKey, _Standing] = {}
        self._tries: dict[tuple[BackendId, int, PinKey], _Tries] = {}

    def check(self, order: PinOrder) -> None:
        """Raise BadRequest or Conflict if this order cannot be kept. Changes nothing."""
        if len(self._encode(order)) > MAX_ORDER_BYTES:
            limit_kib = MAX_ORDER_BYTES // 1024
            raise BadRequest(
                f"a pin for all backends may have at most {limit_kib} KiB: shorten it, or name its backends"
            )
        self._forget_expired()
        if key_of(order) not in self._orders and len(self._orders) >= MAX_ORDERS:
            raise Conflict(f"there are already {MAX_ORDERS} pins for all backends: remove one first")

    def keep(self, order: PinOrder) -> None:
        """Keep this order, unless one with its name is kept already: that is the one the engines have."""
        expires_s = None if order.ttl_s is None else self._clock() + order.ttl_s
        self._orders.setdefault(key_of(order), _Standing(order, expires_s))

    def forget(self, keys: Iterable[PinKey]) -> None:
        """Drop these orders."""
        for key in keys:
            self._orders.pop(key, None)

    def forget_named(self, name: str) -> bool:
        """Drop the orders with this name. Return whether there were any."""
        keys = [key for key in self._orders if key[0] == name]
        self.forget(keys)
        return bool(keys)

    def missing_on(self, backend: Backend, pins: Iterable[Pin]) -> list[MissingPin]:
        """Return the pins that this backend, which has `pins`, does not have yet or refused."""
        held = {(pin.name, pin.owner) for pin in pins}
        self._forget_expired()
        found = []
        for key in self._orders.keys() - held:
            tries = self._tries.get((backend.backend_id, backend.epoch, key), _Tries())
            if not tries.is_done:  # otherwise it was pinned and has been removed there since
                missing = MissingPin(
                    name=key[0],
                    owner=key[1],
                    num_tries=tries.num_tries,
                    is_given_up=tries.is_given_up,
                    problem=tries.problem,
                )
                found.append(missing)
        return sorted(found, key=lambda pin: (pin.name, pin.owner))

    async def running(self) -> None:
        """Check about once a second until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:  # one failed round must not end the task
                logging.getLogger(__name__).exception("standing pins")

    async def look(self) -> None:
        """Apply the orders that are due on each backend. Does nothing if there are no orders."""
        self._forget_expired()
        backends = [
            backend
            for backend in self._fleet.view.backends.values()
            if backend.engine in ENGINES_WITH_PINS and backend.state.is_routable
        ]
        lives = {(backend.backend_id, backend.epoch) for backend in self._fleet.view.backends.values()}
        self._tries = {
            place: tries
            for place, tries in self._tries.items()
            if place[:2] in lives and place[2] in self._orders
        }
        if self._orders:
            await asyncio.gather(*map(self._bring, backends))

    async def _bring(self, backend: Backend) -> None:
        due = []
        for key in self._orders:
            tries = self._tries.setdefault((backend.backend_id, backend.epoch, key), _Tries())
            if not tries.is_done and not tries.is_given_up and tries.next_s <= self._clock():
                due.append((key, tries))
        if not due:
            return
        held: set[PinKey] | None = None
        for key, tries in due:
            try:
                if held is None:
                    pins = (await self._engines.table(backend.backend_id)).pins
                    held = {(pin.name, pin.owner) for pin in pins}
                if key not in held:
                    await self._add(backend.backend_id, key)
            except GatewayError as error:
                self._note_failure(backend.backend_id, key, tries, error)
            else:
                tries.is_done, tries.problem = True, None

    async def _add(self, backend_id: BackendId, key: PinKey) -> None:
        standing = self._orders.get(key)
        if standing is None:
            return
        await self._engines.add(backend_id, self._encode(self._order_now(standing)))
        log_event("pin_repeated", backend=backend_id, pin=key[0])
        if key not in self._orders:  # removed meanwhile
            await self._engines.remove(backend_id, key[0])

    def _order_now(self, standing: _Standing) -> PinOrder:
        """Return the order with its remaining time to live."""
        if standing.expires_s is None:
            return standing.order
        ttl_s = max(1.0, standing.expires_s - self._clock())
        return msgspec.structs.replace(standing.order, ttl_s=ttl_s)

    def _note_failure(self, backend_id: BackendId, key: PinKey, tries: _Tries, error: GatewayError) -> None:
        tries.num_tries += 1
        tries.next_s = self._clock() + FIRST_PAUSE_S * 2 ** (tries.num_tries - 1)
        tries.problem = error.message
        if tries.is_given_up:
            log_event(
                "pin_not_repeated",
                level=logging.WARNING,
                backend=backend_id,
                pin=key[0],
                reason=error.message,
            )

    def _forget_expired(self) -> None:
        now_s = self._clock()
        self.forget(
            [
                key
                for key, standing in self._orders.items()
                if standing.expires_s is not None and standing.expires_s <= now_s
            ]
        )
