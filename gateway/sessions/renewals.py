"""Renewals that wait to be sent: one per session, however many turns it had meanwhile, and bounded.

Knows no I/O. When the bound is reached the oldest is dropped and counted: what is lost is an extension of a
session's life, never its home.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from gateway.values import SessionKey


class Renewal(msgspec.Struct, frozen=True, gc=False):
    """What a turn tells the store: this home was used, and the session is so large now."""

    version: int
    context_tokens: int
    num_turns: int


class PendingRenewals:
    """Oldest first."""

    def __init__(self, max_renewals: int) -> None:
        self._max_renewals = max_renewals
        self._renewals: OrderedDict[SessionKey, Renewal] = OrderedDict()
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._renewals)

    def add(self, key: SessionKey, renewal: Renewal) -> None:
        """Put a renewal in, over an earlier one of the same or an older home."""
        held = self._renewals.get(key)
        if held is not None and held.version > renewal.version:
            return
        self._renewals[key] = renewal
        self._drop_excess()

    def take(self, limit: int) -> list[tuple[SessionKey, Renewal]]:
        """The oldest that wait, so many at most; they wait no more."""
        number = min(limit, len(self._renewals))
        return [self._renewals.popitem(last=False) for _ in range(number)]

    def put_back(self, unsent: list[tuple[SessionKey, Renewal]]) -> None:
        """Return what could not be sent, unless something newer came meanwhile; to the old end."""
        for key, renewal in reversed(unsent):
            if key not in self._renewals:
                self._renewals[key] = renewal
                self._renewals.move_to_end(key, last=False)
        self._drop_excess()

    def discard(self, key: SessionKey) -> None:
        self._renewals.pop(key, None)

    def _drop_excess(self) -> None:
        while len(self._renewals) > self._max_renewals:
            self._renewals.popitem(last=False)
            self.num_dropped += 1
