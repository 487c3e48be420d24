"""Operators' orders as values: the latest one for each subject, and how two replicas' knowledge becomes one.

A subject is one thing that can be ordered of one backend: its state (cordoned, draining, removed, or none of
these) or its weight. Of two orders for a subject the later one holds. So `merge` is commutative, associative
and idempotent: replicas that have exchanged what they know agree, in whatever order and however often they
were told. Absence means nothing here. To take an order back is an order too, with an empty `wants`.

Time. An order's `ms` is a hybrid logical clock (Kulkarni et al., 2014): the larger of the author's wall clock
and one more than the latest order that the author knew. An order given in knowledge of another is later than
it, whatever the clocks say; the author's name decides between equals.

Lifetime. An order is in force where its backend is in the fleet, or where a file or a source still names it.
Replicas where it is in force renew it. One that nobody has renewed for a lifetime is forgotten by all: it is
about a backend that is gone. Until then a replica that was cut off cannot bring an older order back.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from gateway.values import NAME_PATTERN, BackendId

MAX_NOT_IN_FORCE = 1000
"""Most orders kept for backends that are gone, the latest ones: some fleets change by the minute."""

_WEIGHT_SUFFIX = "/weight"  # no backend's name contains a slash
MAX_MS = 2**52  # exact as a float: Lua knows no other numbers
MAX_AUTHOR_LENGTH = 64
ORDER_RULE = {"MAX_MS": MAX_MS, "MAX_AUTHOR_LENGTH": MAX_AUTHOR_LENGTH}
"""What the board's script has to know of this, so that it keeps no order that is refused here."""
_Time = Annotated[int, Meta(ge=0, le=MAX_MS)]
_Author = Annotated[str, Meta(max_length=MAX_AUTHOR_LENGTH, pattern=r"^[ -~]*$(?!\n)")]
_NAME = re.compile(NAME_PATTERN)


class Subject(NamedTuple):
    """What an order is about."""

    backend_id: BackendId
    about: Literal["state", "weight"]

    def __str__(self) -> str:
        return self.backend_id + (_WEIGHT_SUFFIX if self.about == "weight" else "")


def subject_named(name: str) -> Subject:
    """Reverse `str(subject)`. Raises ValueError if no backend can have this name."""
    backend_id = name.removesuffix(_WEIGHT_SUFFIX)
    if _NAME.fullmatch(backend_id) is None:
        raise ValueError("not a backend's name")
    return Subject(BackendId(backend_id), "state" if backend_id == name else "weight")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One order. Values from Redis are validated when read."""

    ms: _Time = 0
    author: _Author = ""
    renewed_ms: _Time = 0
    wants: Literal["", "cordoned", "draining", "removed"] = ""
    deadline_wall_s: float | None = None  # of a drain, in wall time: the only clock that replicas share
    epoch: int | None = None  # of a drain that ends when the backend restarts
    address: str = ""  # hash of the backend's URL: whoever removed it brings back this one and no other
    weight: Annotated[float, Meta(ge=0, le=1000)] | None = None

    @property
    def version(self) -> tuple[int, str]:
        return self.ms, self.author

    def is_later(self, other: Order | None) -> bool:
        """Whether this one holds, or is the same order renewed later."""
        return other is None or (*self.version, self.renewed_ms) > (*other.version, other.renewed_ms)


Orders = Mapping[Subject, Order]


def merge(ours: Orders, theirs: Orders) -> dict[Subject, Order]:
    """Return the later order for each subject."""
    return {**ours, **untold(theirs, ours)}


def untold(ours: Orders, theirs: Orders) -> dict[Subject, Order]:
    """Return those of ours that the others do not know."""
    return {subject: order for subject, order in ours.items() if order.is_later(theirs.get(subject))}


def next_ms(now_ms: int, last_ms: int) -> int:
    """Return the time of a new order; `last_ms` is that of the latest order seen so far."""
    return max(now_ms, last_ms + 1)


def renew(
    orders: Orders, in_force: Collection[Subject], now_ms: int, lifetime_ms: int
) -> dict[Subject, Order]:
    """Return the orders, with those in force renewed that have used up half of their lifetime."""
    return {
        subject: msgspec.structs.replace(order, renewed_ms=now_ms)
        if subject in in_force and now_ms - order.renewed_ms > lifetime_ms / 2
        else order
        for subject, order in orders.items()
    }


def forgettable(
    orders: Orders, in_force: Collection[Subject], now_ms: int, lifetime_ms: int
) -> dict[Subject, Order]:
    """Return the orders to forget: not in force and not renewed for a lifetime, or beyond the most kept."""
    others = [subject for subject in orders if subject not in in_force]
    others.sort(key=lambda subject: (orders[subject].renewed_ms, subject), reverse=True)
    return {
        subject: orders[subject]
        for place, subject in enumerate(others)
        if place >= MAX_NOT_IN_FORCE or now_ms - orders[subject].renewed_ms > lifetime_ms
    }
