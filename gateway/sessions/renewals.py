"""Renewals waiting to be sent: bounded, and one per session, however many turns it has had since.

No I/O. At the bound the oldest is dropped and counted: the session may expire earlier, but its home is not
lost before that.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from gateway.values import SessionKey


class Renewal(msgspec.Struct, frozen=True, gc=False):
    """One turn, as the store learns of it: this home was used, and the session now has this size."""

    version: int
    context_tokens: int
    num_turns: int


class PendingRenewals:
    """A bounded queue, oldest first."""

    def __init__(self, max_renewals: int) -> None:
        self._max_renewals = max_renewals
        self._renewals: OrderedDict[SessionKey, Renewal] = OrderedDict()
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._renewals)

    def add(self, key: SessionKey, renewal: Renewal) -> None:
        """Add a renewal; it replaces one of the same or an older home."""
        held = self._renewals.get(key)
        if held is not None and held.version > renewal.version:
            return
        self._renewals[key] = renewal
        self._drop_excess()

    def take(self, limit: int) -> list[tuple[SessionKey, Renewal]]:
        """Remove and return the oldest, at most `limit`."""
        number = min(limit, len(self._renewals))
        return [self._renewals.popitem(last=False) for _ in range(number)]

    def put_back(self, unsent: list[tuple[SessionKey, Renewal]]) -> None:
        """Put back what could not be sent, at the old end, unless there is a newer renewal by now."""
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
