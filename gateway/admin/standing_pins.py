"""Pins of the whole fleet: what a backend lacks that came later, or came again without its pins, it gets.

An order for all backends stands: this replica keeps it, prompt text included, in its memory only, until it is
taken back, expires, or the replica ends. Each life (epoch) of each backend is brought what it lacks, once;
what an operator or the engine lets go there afterwards stays gone. A backend that refuses or fails is tried
again a few times, ever later, and then left alone until its next life.

Invariant: nothing is pinned twice, because the engine's own list is read first. Orders that name backends do
not stand: they were for those.
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
"""With pauses that double: about a minute of trying."""
MAX_ORDERS = 64
MAX_ORDER_BYTES = 1024 * 1024
"""Of one standing order: a system prompt with its tools, not a library."""

PinKey = tuple[str, str]
"""Name and owner: what an engine tells pins apart by."""
OrderEncoder = Callable[[PinOrder], bytes]


@dataclass(slots=True)
class _Standing:
    order: PinOrder
    expires_s: float | None


@dataclass(slots=True)
class _Tries:
    """How it goes with one order on one life of one backend."""

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
    """Owns one background task while it is `running`."""

    def __init__(
        self,
        fleet: Fleet,
        engines: EnginePins,
        encode: OrderEncoder,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`encode` makes the engine's request from an order; raises BadRequest where that has become void."""
        self._fleet, self._engines, self._encode, self._clock = fleet, engines, encode, clock
        self._orders: dict[PinKey, _Standing] = {}
        self._tries: dict[tuple[BackendId, int, PinKey], _Tries] = {}

    def check(self, order: PinOrder) -> None:
        """Raises BadRequest or Conflict for an order that could not stand. Changes nothing."""
        if len(self._encode(order)) > MAX_ORDER_BYTES:
            raise BadRequest(f"a pin for all backends may be {MAX_ORDER_BYTES // 1024} KiB; name backends")
        self._forget_expired()
        if key_of(order) not in self._orders and len(self._orders) >= MAX_ORDERS:
            raise Conflict(f"{MAX_ORDERS} pins for all backends stand already: take one back first")

    def keep(self, order: PinOrder) -> None:
        """Let this order stand. One of its name that stands already is what the engines have: it stays."""
        expires_s = None if order.ttl_s is None else self._clock() + order.ttl_s
        self._orders.setdefault(key_of(order), _Standing(order, expires_s))

    def forget(self, keys: Iterable[PinKey]) -> None:
        """Let these orders stand no longer."""
        for key in keys:
            self._orders.pop(key, None)

    def forget_named(self, name: str) -> bool:
        """Whether an order of this name stood; it does no longer."""
        keys = [key for key in self._orders if key[0] == name]
        self.forget(keys)
        return bool(keys)

    def missing_on(self, backend: Backend, pins: Iterable[Pin]) -> list[MissingPin]:
        """What this backend, which has these pins, is still to get, or would not take."""
        held = {(pin.name, pin.owner) for pin in pins}
        self._forget_expired()
        found = []
        for key in self._orders.keys() - held:
            tries = self._tries.get((backend.backend_id, backend.epoch, key), _Tries())
            if not tries.is_done:  # else it was let go there since
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
        """Look about once a second, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:  # supervisor of its own rounds: one bad round must not end the others
                logging.getLogger(__name__).exception("standing pins")

    async def look(self) -> None:
        """Bring every backend what is due there. Costs nothing while no order stands."""
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
        if key not in self._orders:  # taken back meanwhile
            await self._engines.remove(backend_id, key[0])

    def _order_now(self, standing: _Standing) -> PinOrder:
        """The order with the time that it has left."""
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
