"""The answers of the admin API about operators' orders. See `answers.py`."""

from __future__ import annotations

from typing import Literal

import msgspec


class OrderAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The latest order about one backend: its state (cordoned, draining, removed, or "" for none of these; an
    order taken back is an order too) or its weight."""

    backend: str
    about: Literal["state", "weight"]
    wants: str
    weight: float | None
    at_wall_s: float
    """When it was given, by the clock of the gateway that accepted it."""
    author: str
    """The gateway process that accepted it, as an opaque name."""
    is_shared: bool
    """Whether it is stored in Redis, where every gateway reads it about once a second. While it is not, it
    holds at this gateway, which tells it again every second until it is stored. Always true for a gateway
    that shares with no other."""


class OrderList(msgspec.Struct, frozen=True, kw_only=True):
    """The orders that this gateway knows, also those about backends that were removed."""

    orders: list[OrderAnswer]
